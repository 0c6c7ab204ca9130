"""The thread that a tracker works on, so that training neither waits for it nor ends with it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import final

from echelon.observe.trackers.tracker import Tracker
from echelon.process.background_threads import run_in_background

_Call = Callable[[Tracker], None]

MOST_WAITING = 10_000  # calls; a tracker that is so far behind does not come back
OPEN_S = 60.0  # how long training waits until a tracker is open
CLOSE_S = 60.0  # how long it waits until a tracker has stored everything
CLOSE_AFTER_ERROR_S = 5.0  # the same when an exception ends the training


@final
class TrackerThread:
    """A tracker on a thread of its own, which takes its calls one after the other.

    After the first exception it takes none. Some packages keep what they opened to the thread that
    opened it, so the tracker is opened and closed there, too.

    Args:
        name: of the tracker, for messages.
        open: makes the tracker.
    """

    def __init__(self, name: str, open: Callable[[], Tracker], open_s: float = OPEN_S) -> None:
        self.name = name
        self._open = open
        self._calls: queue.Queue[_Call | None] = queue.Queue(MOST_WAITING)
        self._is_open = threading.Event()
        self._trouble: str | None = None
        self._thread = run_in_background(f"tracker {name}", self._work, stop=self._ask_to_close)
        if not self._is_open.wait(open_s):
            # It may open yet: the queue keeps what comes until then.
            self._trouble = f"has not opened within {open_s:g} s"

    def _work(self) -> None:
        try:
            tracker = self._open()
            self._is_open.set()
            while (call := self._calls.get()) is not None:
                call(tracker)
            tracker.close()
        except Exception as error:
            self._trouble = f"failed: {type(error).__name__}: {error}"
            self._is_open.set()

    def put(self, call: _Call) -> None:
        """Have ``call`` made after those before it."""
        if not self._thread.is_alive():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._trouble = f"is {MOST_WAITING} calls behind"

    def _ask_to_close(self) -> None:
        """Have the tracker closed after all calls, where a script ends that has not done it."""
        with suppress(queue.Full):  # it is so far behind that it would not come to this, either
            self._calls.put_nowait(None)

    def close(self, close_s: float) -> None:
        """Close the tracker after all calls, and wait for that."""
        end = time.monotonic() + close_s
        try:
            self._calls.put(None, timeout=close_s)
            self._thread.join(max(0.0, end - time.monotonic()))
        except queue.Full:
            pass  # the thread is alive, which is said below
        if self._thread.is_alive():
            self._trouble = f"has not stored everything within {close_s:g} s"

    def trouble(self) -> str | None:
        """What went wrong since the last call, for a sentence that begins with the tracker."""
        trouble, self._trouble = self._trouble, None
        return trouble
