"""The debugger of simulated ranks, for code below the package that has it."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType, TracebackType

# Stops in a frame, or looks at that of a traceback; the second argument is printed before.
OpenDebugger = Callable[[FrameType | TracebackType, str | None], None]

# Of ranks that are processes.
DEBUG_INSTEAD = (
    'run the program with ec.run(..., world="threads") or echelon run --world threads, or attach a '
    "debugger to one process: debugpy.listen(5678 + world.rank), debugpy.wait_for_client()"
)

_offered: list[OpenDebugger] = []


def offer_debugger(open_debugger: OpenDebugger) -> None:
    """Say what opens the debugger from now on.

    Example:
        >>> before = _offered[:]
        >>> offer_debugger(lambda frame, header: print(frame.f_code.co_name))
        >>> import sys
        >>> open_debugger(sys._getframe())
        <module>
        >>> _offered[:] = before
    """
    _offered[:] = [open_debugger]


def open_debugger(frame: FrameType | TracebackType, header: str | None = None) -> None:
    """Open the debugger that was offered; see ``OpenDebugger``."""
    (offered,) = _offered
    offered(frame, header)


def no_debugger(error: BaseException) -> str | None:
    """What to do where pdb has ended because nobody could type."""
    from bdb import BdbQuit  # takes as long as all else that ``import echelon`` loads

    if not isinstance(error, BdbQuit):
        return None
    return f"pdb has ended, or had no input in this process: {DEBUG_INSTEAD}"
