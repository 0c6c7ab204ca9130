"""Threads beside the one that runs a script: they never keep it from its end, nor spoil it.

[Note: the end of the interpreter]
A daemon thread that comes back from an operation of torch while the interpreter is being taken
down is unwound through C++ code that allows no such thing, and the whole process aborts (exit code
134), whatever the script has done. So before that the threads that still run get some time, and
then an exception of their own. One that is stuck inside a single call cannot be reached; it does
not come back, either.

A thread that has ended for Python has not ended for the system: it still destroys what C++ keeps
for each thread. Of a backward that failed, autograd keeps the tasks that are left, which hold
objects of Python. So the end of the interpreter awaits the end of the system's threads, too.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
import weakref
from collections.abc import Callable

from echelon.process import time_limits
from echelon.process.process_status import SystemThread

_PAUSE_S = 0.001  # a thread that has ended for Python has little left to do

_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_of_system: list[SystemThread] = []  # of those that have started, and may still run


def run_in_background(name: str, target: Callable[..., object], *args: object) -> threading.Thread:
    """Call ``target(*args)`` on a thread of that name, which the end of the script does not await.

    Example:
        >>> thread = run_in_background("sum", print, 1 + 2)
        3
        >>> thread.join()
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    _of_system[:] = [kept for kept in _of_system if kept.is_alive()]
    if thread.native_id is not None and (system := SystemThread.of(thread.native_id)) is not None:
        _of_system.append(system)
    return thread


def end_all() -> None:
    """End the threads that still run. See [Note: the end of the interpreter]."""
    if _all_ended(time_limits.END_THREADS_S):
        return
    for thread in list(_started):
        tell_to_end(thread)
    _all_ended(time_limits.END_TOLD_THREADS_S)


def tell_to_end(thread: threading.Thread) -> None:
    """Raise ``SystemExit`` in a thread, when it next runs a line of Python."""
    if thread.is_alive() and thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
        )


def _all_ended(seconds: float) -> bool:
    """Whether all threads end within that time, for Python and for the system."""
    deadline = time.monotonic() + seconds
    for thread in list(_started):
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in list(_started)):
        return False
    while any(thread.is_alive() for thread in list(_of_system)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_S)
    return True


atexit.register(end_all)
