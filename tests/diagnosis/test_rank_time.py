import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from echelon.diagnosis import rank_time
from echelon.diagnosis.rank_time import RankTime
from echelon.diagnosis.step_rows import Activity, RankSteps, StepTimes


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def measured(clock: Clock) -> Iterator[RankTime]:
    """The clock of a rank on this thread, whose kernel counts nothing."""
    rank = RankTime(clock=clock)
    rank.start()
    assert rank._kernel is not None
    rank._kernel.close()
    rank._kernel_mark = 0, 0
    yield rank
    rank.stop()


@contextmanager
def waiting() -> Iterator[None]:
    """Count the body as a call of a group."""
    rank = rank_time.current()
    assert rank is not None
    before = rank.begin_call()
    yield
    rank.end(before)


def last_step(rank: RankTime) -> StepTimes:
    steps = RankSteps.of(0, rank.rows.numbers()).steps
    return steps[max(steps)]


def spans(rank: RankTime) -> dict[Activity, int]:
    """What the last step has of each activity that it has."""
    return {activity: ns for activity in Activity if (ns := last_step(rank).spans_ns[activity])}


def test_a_step_is_divided_into_what_the_rank_did(measured: RankTime, clock: Clock) -> None:
    clock.now += 1
    with rank_time.during(Activity.LOADING):
        clock.now += 10
        with rank_time.during(Activity.COMMUNICATION):
            clock.now += 100
        clock.now += 20
    rank_time.begin_forward()
    clock.now += 1000
    with waiting():
        clock.now += 200
    clock.now += 1000
    with rank_time.during(Activity.BACKWARD):
        clock.now += 4000
    clock.now += 2
    measured.end_step()
    assert spans(measured) == {
        Activity.LOADING: 30,
        Activity.COMMUNICATION: 300,
        Activity.FORWARD: 2000,
        Activity.BACKWARD: 4000,
        Activity.OTHER: 3,
    }
    assert last_step(measured).wall_ns == clock.now


def test_without_a_forward_that_is_seen_all_before_backward_is_called_so(
    measured: RankTime, clock: Clock
) -> None:
    clock.now += 5
    with rank_time.during(Activity.BACKWARD):
        clock.now += 10
    clock.now += 1
    measured.end_step()
    assert spans(measured) == {
        Activity.BEFORE_BACKWARD: 5,
        Activity.BACKWARD: 10,
        Activity.OTHER: 1,
    }


def test_a_forward_without_a_backward_ends_where_the_next_batch_is_loaded(
    measured: RankTime, clock: Clock
) -> None:
    rank_time.begin_forward()
    clock.now += 5
    with rank_time.during(Activity.LOADING):
        clock.now += 7
    clock.now += 1
    measured.end_step()
    assert spans(measured) == {Activity.FORWARD: 5, Activity.LOADING: 7, Activity.OTHER: 1}


def test_a_forward_in_a_backward_is_backward(measured: RankTime, clock: Clock) -> None:
    with rank_time.during(Activity.BACKWARD):
        rank_time.begin_forward()
        clock.now += 5
        rank_time.end_forward()
        clock.now += 1
    measured.end_step()
    assert spans(measured)[Activity.BACKWARD] == 6


def test_what_delays_a_call_counts_as_done_before_it(measured: RankTime, clock: Clock) -> None:
    with (
        rank_time.during(Activity.BACKWARD),
        waiting(),
        rank_time.before_communication(),
    ):
        clock.now += 9
    measured.end_step()
    assert spans(measured) == {Activity.BACKWARD: 9}


def test_an_activity_goes_on_over_the_end_of_a_step(measured: RankTime, clock: Clock) -> None:
    with rank_time.during(Activity.BACKWARD):
        clock.now += 1
        measured.end_step()
        clock.now += 2
    measured.end_step()
    assert spans(measured) == {Activity.BACKWARD: 2}


def test_a_rank_that_others_keep_from_the_processor_is_not_busy() -> None:
    rank = RankTime()
    rank.start()
    assert rank._kernel is not None
    rank._kernel.read = lambda: (5_000_000, 40_000_000)  # type: ignore[method-assign]
    rank._kernel_mark = 0, 10_000_000
    before = rank_time.begin(Activity.BACKWARD)
    time.sleep(0.05)
    rank_time.end(before)
    rank.end_step()
    rank.stop()
    step = last_step(rank)
    assert step.spans_ns[Activity.PROCESSOR] == 30_000_000
    assert step.ran_ns[Activity.BACKWARD] == 5_000_000
    assert 20_000_000 <= step.spans_ns[Activity.BACKWARD] < step.wall_ns - 29_000_000


def test_only_the_thread_of_the_rank_is_measured(measured: RankTime, clock: Clock) -> None:
    def work() -> None:
        with rank_time.during(Activity.SAVING):
            clock.now += 5

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    measured.end_step()
    assert spans(measured) == {Activity.OTHER: 5}


def test_nothing_is_measured_after_the_end_and_no_file_stays_open() -> None:
    files = set(os.listdir("/proc/self/fd"))
    rank = RankTime()
    rank.start()
    assert rank_time.current() is rank
    rank.stop()
    assert rank_time.current() is None
    with rank_time.during(Activity.SAVING):
        pass
    rank_time.begin_forward()
    rank_time.end_forward()
    rank_time.call_stage()
    assert set(os.listdir("/proc/self/fd")) == files


def test_a_fork_writes_nothing_into_the_table_of_the_rank() -> None:
    rank = RankTime()
    rank.start()
    rows = rank.rows
    pid = os.fork()
    if pid == 0:
        os._exit(int(rank.rows is rows or rank_time.current() is not None))
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert rank_time.current() is rank
    rank.stop()
