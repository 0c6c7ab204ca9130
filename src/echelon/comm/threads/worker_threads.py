"""Which threads a simulated rank communicates from, and whether one of them may go on by itself.

[Note: an idle thread]
A thread of a pool waits for work that only another thread gives it. So it brings nothing about as
long as it stays in that wait, which its frame shows: the wait has no limit of time. It may have
been woken and not have run yet, so it counts as idle only when it is seen in the same wait
``LOOKS`` times, ``LOOK_S`` apart.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Collection
from typing import final

LOOK_S = 0.1
LOOKS = 3

_POOL = ("concurrent/futures/thread.py", "_worker")  # waits in a queue written in C
_WAIT = ("threading.py", "wait")  # of a condition, also below events and queues


@final
class WorkerThreads:
    """The threads of one rank that have ever waited in a call of a group."""

    def __init__(self) -> None:
        self._threads: dict[int, threading.Thread] = {}
        self._seen: dict[int, tuple[int, int, int]] = {}  # by thread: its wait, and how often

    def note(self) -> bool:
        """Record the calling thread; whether there are several now."""
        self._threads[threading.get_ident()] = threading.current_thread()
        return len(self._threads) > 1

    def are_several(self) -> bool:
        """Whether more than one of them lives."""
        if len(self._threads) > 1:
            for number, thread in list(self._threads.items()):
                if not thread.is_alive():
                    self._threads.pop(number, None)
                    self._seen.pop(number, None)
        return len(self._threads) > 1

    def may_go_on(self, waiting: Collection[int]) -> bool:
        """Whether one of them may go on that is not among those that wait in calls of groups."""
        others = [number for number in list(self._threads) if number not in waiting]
        return self.are_several() and not all(map(self._is_idle, others))

    def _is_idle(self, number: int) -> bool:
        """See [Note: an idle thread]."""
        thread = self._threads.get(number)
        if thread is None or not thread.is_alive():
            return True
        wait = _endless_wait(number)
        if wait is None:
            self._seen.pop(number, None)
            return False
        *before, times = self._seen.get(number, (0, 0, 0))
        times = times + 1 if tuple(before) == wait else 1
        self._seen[number] = (*wait, times)
        return times > LOOKS


def _endless_wait(number: int) -> tuple[int, int] | None:
    """What tells a wait without a limit of a thread from its other waits; None: it is in none."""
    frame = sys._current_frames().get(number)
    if frame is None:
        return None
    code = frame.f_code
    is_pool = code.co_filename.endswith(_POOL[0]) and code.co_name == _POOL[1]
    is_wait = code.co_filename.endswith(_WAIT[0]) and code.co_name == _WAIT[1]
    if not is_pool and not (is_wait and frame.f_locals.get("timeout", 0) is None):
        return None
    return id(frame), frame.f_lasti
