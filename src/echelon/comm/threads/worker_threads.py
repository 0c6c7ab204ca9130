"""Which threads a simulated rank may communicate from, and whether one may go on by itself.

These are the thread that takes the turns of the rank, and those that it has started: one of them
may come to its first call yet.

[Note: an idle thread]
A thread of a pool waits for work that only another thread gives it. So it brings nothing about as
long as it stays in that wait, which its frame shows: the wait has no limit of time. A thread that
has not communicated yet is most often none that will, as the monitor of a progress bar: it is also
idle in a wait of Python that has a limit. A thread may have been woken and not have run yet, so it
counts as idle only when it is seen in the same wait ``LOOKS`` times, ``LOOK_S`` apart. A timer
waits for its time and for nobody, so it is not idle before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import final

from echelon.comm.threads.running_time import running_s
from echelon.process.thread_frames import current_frames

LOOK_S = 0.1
LOOKS = 3

# Where threads wait for others. In the first two they wait in a queue written in C.
_ENDLESS = (("concurrent/futures/thread.py", "_worker"), ("background_threads.py", "_work"))
_WAIT = ("threading.py", "wait")  # of a condition, also below events and queues
_POLL = ("selectors.py", "select")


@final
class WorkerThreads:
    """The threads of one rank that have waited in a call of a group, or that may yet do so.

    Args:
        started: returns the threads that run and that the rank has started.
    """

    def __init__(self, started: Callable[[], Sequence[threading.Thread]]) -> None:
        self._started = started
        self._threads: dict[int, threading.Thread] = {}
        self._seen: dict[int, tuple[tuple[int, int], int, float]] = {}  # wait, looks, the last one

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
        return len(self._threads) > 1 or bool(self._started())

    def may_go_on(self, waiting: Collection[int]) -> bool:
        """Whether one of them may go on that is not among those that wait in calls of groups."""
        started = self._started()
        if any(_is_timer_to_come(thread) for thread in started):
            return True
        known = {*self._threads, *(thread.ident or 0 for thread in started)}
        looks = [self._is_idle(number) for number in known.difference(waiting)]
        return not all(looks)  # each was looked at, so that all are seen often enough in the end

    def _is_idle(self, number: int) -> bool:
        """See [Note: an idle thread]."""
        thread = self._threads.get(number)
        if thread is not None and not thread.is_alive():
            return True
        wait = _wait_of(number, with_limit=thread is None)
        if wait is None:
            self._seen.pop(number, None)
            return False
        before, looks, looked_s = self._seen.get(number, (None, 0, 0.0))
        now_s = running_s()
        if wait != before:
            self._seen[number] = wait, 1, now_s
            return False
        if now_s - looked_s >= LOOK_S:
            looks += 1
            self._seen[number] = wait, looks, now_s
        return looks > LOOKS


def _is_timer_to_come(thread: threading.Thread) -> bool:
    return isinstance(thread, threading.Timer) and not thread.finished.is_set()


def _wait_of(number: int, *, with_limit: bool) -> tuple[int, int] | None:
    """What tells a wait of a thread for others from its other waits; None: it is in none.

    Args:
        number: of the thread.
        with_limit: whether a wait that has a limit of time counts.
    """
    frame = current_frames().get(number)
    if frame is None:
        return None
    code = frame.f_code

    def is_at(file: str, function: str) -> bool:
        return code.co_name == function and code.co_filename.endswith(file)

    waits = (
        any(is_at(*place) for place in _ENDLESS)
        or (is_at(*_WAIT) and (with_limit or frame.f_locals.get("timeout", 0) is None))
        or (is_at(*_POLL) and with_limit)
    )
    return (id(frame), frame.f_lasti) if waits else None
