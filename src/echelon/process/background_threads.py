"""Threads beside the one that runs a script: they never keep it from its end, nor spoil it.

[Note: the end of the interpreter]
A daemon thread that comes back from an operation of torch while the interpreter is being taken
down is unwound through C++ code that allows no such thing, and the whole process aborts (exit code
134), whatever the script has done. So before that the threads that still run get some time, and
then an exception of their own. One that is stuck inside a single call cannot be reached; it does
not come back, either. A thread that waits for work is asked to end by its own way, at once.

A thread that has ended for Python has not ended for the system: it still destroys what C++ keeps
for each thread. Of a backward that failed, autograd keeps the tasks that are left, which hold
objects of Python. So the end of the interpreter awaits the end of the system's threads, too.
"""

from __future__ import annotations

import atexit
import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, final

from echelon.process import time_limits
from echelon.process.operating_system import at_fork
from echelon.process.process_status import SystemThread

_T = TypeVar("_T")
_PAUSE_S = 0.001  # a thread that has ended for Python has little left to do

# With what asks a thread to end, where there is such a method.
_started: weakref.WeakKeyDictionary[threading.Thread, weakref.WeakMethod[Any] | None] = (
    weakref.WeakKeyDictionary()
)
_of_system: list[SystemThread] = []  # of those that have started, and may still run


def run_in_background(
    name: str,
    target: Callable[..., object],
    *args: object,
    stop: Callable[[], object] | None = None,
    until_the_end: bool = False,
    stops_in_debugger: bool = True,
) -> threading.Thread:
    """Call ``target(*args)`` on a thread of that name, which the end of the script does not await.

    Args:
        stop: a method that asks the thread to end; it is called at the end of the script.
        until_the_end: the thread uses nothing of torch, and may run as long as the process does.
        stops_in_debugger: whether debugpy traces the thread, and may stop it.

    Example:
        >>> thread = run_in_background("sum", print, 1 + 2)
        3
        >>> thread.join()
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    if not stops_in_debugger:
        untraced: Any = thread
        untraced.pydev_do_not_trace = True
    if not until_the_end:
        _started[thread] = None if stop is None else weakref.WeakMethod(stop)
    thread.start()
    _of_system[:] = [kept for kept in _of_system if kept.is_alive()]
    known = None if thread.native_id is None else SystemThread.of(thread.native_id)
    if known is not None and not until_the_end:
        _of_system.append(known)
    return thread


@final
class _IdleThreads:
    """Threads that have done something and wait for more; they are started when there are none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[queue.SimpleQueue[Callable[[], object] | None]] = []
        self._ends = False

    def run(self, act: Callable[[], object]) -> None:
        """Call ``act`` on an idle thread, or a new one."""
        with self._lock:
            self._ends = False
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = queue.SimpleQueue()
            run_in_background("echelon background", self._work, calls, stop=self.end)
        calls.put(act)

    def _work(self, calls: queue.SimpleQueue[Callable[[], object] | None]) -> None:
        while (act := calls.get()) is not None:
            act()
            del act  # else what it works on would live until the next one
            with self._lock:
                if self._ends:
                    return
                self._idle.append(calls)

    def end(self) -> None:
        """End the threads that do nothing now."""
        with self._lock:
            self._ends = True
            idle, self._idle = self._idle, []
        for calls in idle:
            calls.put(None)


_idle_threads = _IdleThreads()


def _forget_threads() -> None:
    """A forked process has none of the threads."""
    global _idle_threads
    _idle_threads = _IdleThreads()


at_fork(after_in_child=_forget_threads)


def run_on_idle_thread(act: Callable[[], object]) -> None:
    """Call ``act`` beside the script, on a thread that is kept for the next call.

    To start a thread for each call would take longer than most of them.
    """
    _idle_threads.run(act)


def answer_of(question: Callable[[], _T], seconds: float) -> list[_T]:
    """What ``question()`` returns, as a list of one; empty if it does not return in time.

    Raises:
        Exception: what the question raises.

    Example:
        >>> answer_of(lambda: 3, 10.0)
        [3]
    """
    answers: list[_T] = []
    errors: list[BaseException] = []
    has_ended = threading.Event()

    def ask() -> None:
        try:
            answers.append(question())
        except BaseException as error:
            errors.append(error)
        has_ended.set()

    run_on_idle_thread(ask)
    has_ended.wait(seconds)
    if errors:
        raise errors[0]
    return answers[:1]


def end_all() -> None:
    """End the threads that still run. See [Note: the end of the interpreter]."""
    for stop in list(_started.values()):
        method = None if stop is None else stop()
        if method is not None:
            method()
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
