"""Actions run one after another, in the order in which they were issued."""

import threading

import pytest
import torch

from echelon.comm.ordered_executor import OrderedExecutor
from echelon.diagnosis.collective_call import CallSignature, CallSite, CollectiveCall
from echelon.errors import CommError, CommTimeout, StateError


def call(*, blocking: bool) -> CollectiveCall:
    place = CallSite("train.py", 12, "main")
    return CollectiveCall(CallSignature("all_reduce"), place, 0, "world", 0, blocking)


def test_a_blocking_action_runs_on_its_caller_only_if_nothing_is_outstanding() -> None:
    executor = OrderedExecutor("worker", lambda: ())
    go, ran = threading.Event(), list[tuple[str, int]]()

    def note(name: str) -> None:
        ran.append((name, threading.get_ident()))

    assert executor.issue(call(blocking=True), lambda: note("first")) is None  # it has run
    executor.issue(call(blocking=False), lambda: (go.wait(), note("second"))[1])
    third = executor.issue(call(blocking=True), lambda: note("third"))
    go.set()
    third.wait()
    assert executor.close()
    assert [name for name, _ in ran] == ["first", "second", "third"]
    assert [thread == threading.get_ident() for _, thread in ran] == [True, False, False]


def test_the_background_writes_to_a_view_that_was_made_without_gradients() -> None:
    executor = OrderedExecutor("worker", lambda: ())
    with torch.no_grad():
        view = torch.zeros(4)[:2]
    row = torch.ones(2, requires_grad=True)
    executor.issue(call(blocking=False), lambda: view.copy_(row)).wait()
    assert executor.close()
    assert view.tolist() == [1, 1]


def fail() -> None:
    raise CommError("out of step")


def test_an_executor_that_stops_raises_the_error_once_and_then_refuses() -> None:
    executor = OrderedExecutor("worker", lambda: (), stops_at_error=True)
    work = executor.issue(call(blocking=False), fail)
    queued = executor.issue(call(blocking=False), lambda: None)
    with pytest.raises(CommError, match="out of step"):
        work.wait()
    with pytest.raises(CommError, match="out of step"):
        queued.wait()
    with pytest.raises(StateError, match="an earlier call of this group failed"):
        executor.issue(call(blocking=True), lambda: None)
    executor.close()


def test_all_threads_that_wait_return_and_a_short_wait_can_be_repeated() -> None:
    executor = OrderedExecutor("worker", lambda: (3,))
    go = threading.Event()
    work = executor.issue(call(blocking=False), lambda: (go.wait(), None)[1])
    for seconds in (0.01, 0.0, -1.0):
        with pytest.raises(CommTimeout):
            work.wait(seconds)
    assert not work.done()
    threads = [threading.Thread(target=work.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert work.done()
    work.wait(0.0)
    assert executor.close()


def test_a_closed_executor_refuses_and_drops_what_it_is_told_to() -> None:
    executor = OrderedExecutor("worker", lambda: ())
    started, go = threading.Event(), threading.Event()
    executor.issue(call(blocking=False), lambda: (started.set(), go.wait(), None)[-1])
    started.wait()
    dropped = executor.issue(call(blocking=False), fail)
    assert not executor.close(drop=True, seconds=0.0)
    go.set()
    assert executor.close()
    with pytest.raises(StateError, match="was dropped: its world was closed"):
        dropped.wait()
    with pytest.raises(StateError, match="was issued after its world was closed"):
        executor.issue(call(blocking=True), lambda: None)
