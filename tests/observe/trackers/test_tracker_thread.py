import subprocess
import sys
import threading
from collections.abc import Mapping

import pytest

from echelon.observe.trackers import tracker_thread
from echelon.observe.trackers.tracker_thread import TrackerThread


class ListTracker:
    """Keeps its calls, and on which threads they came; may wait or fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[object] = []
        self.threads = {threading.current_thread()}
        self.error = error
        self.go = threading.Event()
        self.go.set()

    def config(self, values: Mapping[str, object]) -> None:
        self._note(dict(values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._note(step)

    def close(self) -> None:
        self._note("close")

    def _note(self, call: object) -> None:
        self.go.wait(60)
        self.threads.add(threading.current_thread())
        self.calls.append(call)
        if self.error is not None:
            raise self.error


def test_calls_come_in_order_on_the_thread_that_opened_the_tracker() -> None:
    opened: list[ListTracker] = []

    def open() -> ListTracker:
        opened.append(ListTracker())
        return opened[0]

    thread = TrackerThread("list", open)
    for step in range(100):
        thread.put(lambda tracker, step=step: tracker.log({}, step))
    thread.close(60)
    assert opened[0].calls == [*range(100), "close"]
    assert len(opened[0].threads) == 1
    assert threading.current_thread() not in opened[0].threads
    assert thread.trouble() is None


def test_the_first_exception_is_the_last_call_and_is_said_once() -> None:
    tracker = ListTracker(error=OSError("disk full"))
    thread = TrackerThread("list", lambda: tracker)
    for step in range(5):
        thread.put(lambda tracker, step=step: tracker.log({}, step))
    thread.close(60)
    assert tracker.calls == [0]
    assert thread.trouble() == "failed: OSError: disk full"
    assert thread.trouble() is None
    thread.put(lambda tracker: tracker.log({}, 9))
    assert tracker.calls == [0]


def test_an_exception_while_it_opens_is_said_at_once() -> None:
    def open() -> ListTracker:
        raise RuntimeError("no account")

    assert TrackerThread("list", open).trouble() == "failed: RuntimeError: no account"


def test_training_waits_for_no_tracker_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_thread, "MOST_WAITING", 3)
    tracker = ListTracker()
    tracker.go.clear()

    def open() -> ListTracker:
        tracker.go.wait(60)
        return tracker

    thread = TrackerThread("list", open, open_s=0.01)
    assert thread.trouble() == "has not opened within 0.01 s"
    for step in range(4):
        thread.put(lambda tracker, step=step: tracker.log({}, step))
    assert thread.trouble() == "is 3 calls behind"
    thread.close(close_s=0.01)
    assert thread.trouble() == "has not stored everything within 0.01 s"
    tracker.go.set()
    thread.close(60)
    assert tracker.calls == [0, 1, 2, "close"]


def test_a_tracker_that_no_script_closes_has_all_calls_at_the_end() -> None:
    script = """
from echelon.observe.trackers.tracker_thread import TrackerThread
class Printing:
    def config(self, values): pass
    def log(self, values, step): print("step", step, flush=True)
    def close(self): print("closed", flush=True)
thread = TrackerThread("printing", Printing)
for step in range(3):
    thread.put(lambda tracker, step=step: tracker.log({}, step))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n") == ["step 0", "step 1", "step 2", "closed", ""]
