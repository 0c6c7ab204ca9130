"""Stops the clock while a debugger that is not ours has stopped a simulated rank.

``pdb`` and those derived from it wait in ``Cmd.cmdloop``, which is replaced while ranks run.
debugpy tells nobody. But the stack of a rank that it has stopped ends in its code, so while it is
attached somebody looks at the stacks now and then: a thread that it leaves alone, as it may stop
all others. Otherwise nobody looks, because frames that another thread holds keep what they refer
to. (A notebook loads debugpy and attaches it only if somebody debugs.)
"""

from __future__ import annotations

import cmd
import os
import sys
import threading
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any, Self, final

from echelon.comm.threads.running_time import stopped_time
from echelon.process.background_threads import run_in_background
from echelon.process.replacement import Installation, Replacement
from echelon.process.thread_frames import current_frames

_LOOK_S = 0.05
_WAITS = ("pydevd.py", "_do_wait_suspend")  # the file and the function in which debugpy waits
_DEBUGPY = "pydevd"  # the module that does its work


def _cmdloop_in_stopped_time(self: cmd.Cmd, *args: Any, **kwargs: Any) -> None:
    with stopped_time():
        _cmdloop.original(self, *args, **kwargs)


_cmdloop = Replacement(cmd.Cmd, "cmdloop", _cmdloop_in_stopped_time)
_pdb = Installation.of(_cmdloop)


def _is_attached() -> bool:
    """Whether debugpy, or what it is made of, may stop threads of this process."""
    debugpy = sys.modules.get("debugpy")
    return _DEBUGPY in sys.modules and (debugpy is None or bool(debugpy.is_client_connected()))


def is_in_debugpy(frame: FrameType | None = None) -> bool:
    """Whether debugpy has stopped the thread of a frame; by default, the calling one."""
    if _DEBUGPY not in sys.modules:
        return False
    frame = frame or sys._getframe()
    while frame is not None:
        code = frame.f_code
        if (os.path.basename(code.co_filename), code.co_name) == _WAITS:
            return True
        frame = frame.f_back
    return False


@final
class DebuggerWatch:
    """Looks at the threads of this process in a ``with`` block.

    At all of them: debugpy may stop a rank, and with it all other threads, before the thread that
    starts the ranks has been told which one it is.
    """

    def __init__(self) -> None:
        self._stop = ExitStack()  # the stop of the clock that lasts, if one does
        self._is_stopped = False
        self._ended = threading.Event()
        self._in_pdb: AbstractContextManager[None] = _pdb.needed()
        self._looking: threading.Thread | None = None

    def __enter__(self) -> Self:
        self._in_pdb.__enter__()
        self.look()  # before debugpy could stop the thread that looks now and then
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._looking is not None:
            self._looking.join()
        self._stop.close()
        self._in_pdb.__exit__(None, None, None)

    def look(self) -> None:
        """Have a thread look at the stacks from now on, if debugpy is attached."""
        if self._looking is None and _is_attached():
            self._looking = run_in_background(
                "debugger watch", self._look_on, stop=self._ended.set, stops_in_debugger=False
            )

    def _look_at_stacks(self) -> None:
        """Stop the clock if a thread is in the debugger now, or let it run again."""
        stopped = any(map(is_in_debugpy, current_frames().values()))
        if stopped and not self._is_stopped:
            self._stop.enter_context(stopped_time())
        elif self._is_stopped and not stopped:
            self._stop.close()
        self._is_stopped = stopped

    def _look_on(self) -> None:
        while not self._ended.wait(_LOOK_S):
            if self._is_stopped or _is_attached():
                self._look_at_stacks()
