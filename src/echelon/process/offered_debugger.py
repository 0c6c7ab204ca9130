"""The debugger of simulated ranks, for code below the package that has it."""

from __future__ import annotations

from collections.abc import Callable
from types import FrameType

# Stops in a frame; the second argument is printed before.
OpenDebugger = Callable[[FrameType, str | None], None]

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


def open_debugger(frame: FrameType, header: str | None = None) -> None:
    """Open the debugger that was offered."""
    (offered,) = _offered
    offered(frame, header)
