"""Long waits of Python let other ranks run, and short ones do not."""

from __future__ import annotations

import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from echelon.comm.threads.blocking_calls import GRACE_S, handing_on, renew_grace

LONG_S = GRACE_S + 0.05


class Handed:
    """Counts how often a rank has handed on, and says when it gets its turn back."""

    def __init__(self) -> None:
        self.times = 0
        self.may_return = threading.Event()
        self.may_return.set()

    @contextmanager
    def on(self) -> Iterator[None]:
        self.times += 1
        try:
            yield
        finally:
            while not self.may_return.is_set():
                pass


@pytest.fixture
def handed() -> Iterator[Handed]:
    counter = Handed()
    with handing_on(counter.on):
        yield counter


def later(function: object, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, function)  # type: ignore[arg-type]
    timer.start()
    return timer


def test_short_waits_keep_the_turn(handed: Handed) -> None:
    event: threading.Event = threading.Event()
    timer = later(event.set, 0.01)
    assert event.wait()
    timer.join()
    assert not threading.Event().wait(0.01)
    time.sleep(0.01)
    assert handed.times == 0


def test_a_long_sleep_hands_on_and_takes_its_time(handed: Handed) -> None:
    start_s = time.perf_counter()
    time.sleep(LONG_S)
    assert time.perf_counter() - start_s >= LONG_S
    assert handed.times == 1


@pytest.mark.slow
def test_a_long_wait_for_an_event_hands_on(handed: Handed) -> None:
    event = threading.Event()
    timer = later(event.set, LONG_S)
    assert event.wait(20)
    renew_grace()
    assert not threading.Event().wait(LONG_S)
    timer.join()
    assert handed.times == 2


@pytest.mark.slow
def test_a_long_wait_for_a_thread_a_queue_and_a_future_hands_on(handed: Handed) -> None:
    later(lambda: None, LONG_S).join()
    assert handed.times == 1
    renew_grace()
    items: queue.Queue[int] = queue.Queue()
    timer = later(lambda: items.put(3), LONG_S)
    assert items.get() == 3
    assert handed.times == 2
    timer.join()
    renew_grace()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(time.sleep, LONG_S).result() is None
    assert handed.times >= 3  # the end of the pool waits, too
    renew_grace()
    times = handed.times
    with pytest.raises(queue.Empty):
        items.get(timeout=LONG_S)
    assert handed.times == times + 1


@pytest.mark.slow
def test_a_long_wait_for_another_process_hands_on(handed: Handed) -> None:
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        assert not ours.poll(0)
        assert handed.times == 0
        assert not ours.poll(LONG_S)
        assert handed.times == 1
        renew_grace()
        timer = later(lambda: theirs.send(3), LONG_S)
        times = handed.times
        assert ours.poll(20)
        assert handed.times == times + 1
        assert ours.recv() == 3
        timer.join()
        renew_grace()
        theirs.send(4)
        times = handed.times
        assert ours.poll(None)
        assert handed.times == times


def test_short_waits_in_a_loop_add_up_until_the_rank_has_waited_for_others(handed: Handed) -> None:
    for _ in range(int(GRACE_S / 0.01) + 2):
        time.sleep(0.01)
    assert handed.times >= 1
    times = handed.times
    renew_grace()
    time.sleep(0.01)
    assert handed.times == times


@pytest.mark.parametrize("lock", [threading.Lock, threading.RLock])
def test_others_may_take_the_lock_of_a_condition_until_the_turn_comes_back(lock: type) -> None:
    handed, condition = Handed(), threading.Condition(lock())
    handed.may_return.clear()
    steps: list[str] = []

    def other() -> None:
        time.sleep(LONG_S)
        with condition:
            condition.notify()
        with condition:  # while the rank waits for its turn
            steps.append("other")
        handed.may_return.set()

    thread = threading.Thread(target=other)
    thread.start()
    with handing_on(handed.on), condition:
        assert condition.wait(20)
        steps.append("rank")
    thread.join()
    assert steps == ["other", "rank"]


@pytest.mark.slow
def test_threads_that_are_no_ranks_wait_as_ever(handed: Handed) -> None:
    def wait() -> None:
        time.sleep(LONG_S)
        threading.Event().wait(LONG_S)

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        pass
    assert handed.times == 0


def test_bad_arguments_have_the_errors_of_python(handed: Handed) -> None:
    with pytest.raises(ValueError, match="non-negative"):
        time.sleep(-1)
    with pytest.raises(TypeError):
        time.sleep("1")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="un-acquired"):
        threading.Condition().wait()


def test_python_is_as_before_when_the_last_rank_has_ended_and_other_replacements_stay() -> None:
    sleep, wait, join = time.sleep, threading.Condition.wait, threading.Thread.join
    with handing_on(Handed().on):
        assert time.sleep is not sleep
    assert (time.sleep, threading.Condition.wait, threading.Thread.join) == (sleep, wait, join)
    with handing_on(Handed().on):
        replaced = time.sleep = lambda seconds: None
    assert time.sleep is replaced
    time.sleep = sleep


@pytest.mark.slow
def test_a_notification_is_not_lost_while_the_wait_gives_up_its_grace(handed: Handed) -> None:
    condition = threading.Condition()

    def notify_late() -> None:
        with condition:  # the wait gives up meanwhile, and cannot look before it has this lock
            threading.Event().wait(2 * GRACE_S)
            condition.notify()

    with condition:
        timer = later(notify_late, GRACE_S / 2)
        assert condition.wait(20)
        assert not condition.wait(0.01), "it was one notification"
    timer.join()


def test_a_wait_without_the_lock_is_refused(handed: Handed) -> None:
    with pytest.raises(RuntimeError, match="un-acquired lock"):
        threading.Condition().wait()


@pytest.mark.slow
def test_a_rank_that_compiles_keeps_its_turn_while_it_waits(
    handed: Handed, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = SimpleNamespace(compile_lock=threading.RLock())
    monkeypatch.setitem(sys.modules, "torch._dynamo.convert_frame", compiler)  # type: ignore[arg-type]
    with compiler.compile_lock:
        time.sleep(LONG_S)
    assert handed.times == 0
    time.sleep(LONG_S)
    assert handed.times == 1
