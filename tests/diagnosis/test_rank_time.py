import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import cast

import pytest

from echelon.diagnosis import rank_time
from echelon.diagnosis.rank_time import KernelTimes, RankTime
from echelon.diagnosis.step_rows import Activity, RankSteps, StepTimes

MS = 1_000_000


class Clock:
    """A clock that the test moves, and what the kernel counts of a thread that else runs."""

    def __init__(self) -> None:
        self.now = self.idled = self.ready = self.num_asked = 0

    def __call__(self) -> int:
        return self.now

    def idle(self, ns: int, ready: int = 0) -> None:
        """Let time pass in which the thread does not run, though it is ready for some of it."""
        self.now += ns
        self.idled += ns
        self.ready += ready

    def ran_ns(self) -> int:
        return self.now - self.idled

    def ready_ns(self) -> int:
        self.num_asked += 1
        return self.ready

    def close(self) -> None:
        """As ``KernelTimes`` has it."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def measured(clock: Clock) -> Iterator[RankTime]:
    """The clock of a rank on this thread."""
    rank = RankTime(clock=clock)
    start(rank, clock)
    yield rank
    rank.stop()


def start(rank: RankTime, clock: Clock) -> None:
    """Measure this thread by a clock of the test."""
    rank.start()
    assert rank._kernel is not None
    rank._kernel.close()
    rank._kernel = cast(KernelTimes, clock)
    rank._ran_mark, rank._ready_mark = clock.ran_ns(), clock.ready_ns()


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


def blocked(rank: RankTime) -> dict[Activity, int]:
    """For how long the rank was blocked in the last step, in each activity where it was."""
    return {activity: ns for activity in Activity if (ns := last_step(rank).blocked_ns[activity])}


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


def test_what_delays_a_message_that_is_only_posted_counts_as_the_activity_around_it(
    measured: RankTime, clock: Clock
) -> None:
    with waiting():
        pass
    with rank_time.during(Activity.BACKWARD), rank_time.before_communication():
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


def test_a_rank_that_others_keep_from_the_processor_is_not_busy(
    measured: RankTime, clock: Clock
) -> None:
    with rank_time.during(Activity.BACKWARD):
        clock.idle(45 * MS, ready=30 * MS)
        clock.now += 5 * MS
    measured.end_step()
    assert spans(measured) == {Activity.BACKWARD: 20 * MS, Activity.PROCESSOR: 30 * MS}
    assert blocked(measured) == {Activity.BACKWARD: 15 * MS}


def test_where_a_rank_may_have_waited_for_a_message_it_is_not_blocked_in_something_else(
    measured: RankTime, clock: Clock
) -> None:
    with rank_time.during(Activity.BACKWARD):
        with waiting():
            clock.idle(MS // 10)  # too short for a reading of its own
        clock.now += MS
    measured.end_step()
    assert spans(measured) == {Activity.BACKWARD: MS, Activity.COMMUNICATION: MS // 10}
    assert blocked(measured) == {}


def test_a_simulated_rank_that_is_ready_while_its_clock_stands_loses_no_time(
    measured: RankTime, clock: Clock
) -> None:
    clock.ready += 7 * MS
    with rank_time.during(Activity.BACKWARD):
        clock.now += MS
    measured.end_step()
    assert spans(measured) == {Activity.BACKWARD: MS}


def test_the_kernel_is_asked_only_where_an_idle_time_is_to_be_divided(
    measured: RankTime, clock: Clock
) -> None:
    asked_before = clock.num_asked
    for _ in range(5):
        with rank_time.during(Activity.BACKWARD):
            clock.now += 2 * MS
        with waiting():
            clock.idle(MS // 2)
    measured.end_step()
    assert clock.num_asked == asked_before
    with rank_time.during(Activity.BACKWARD):
        clock.now += MS
        clock.idle(MS // 2)
    with waiting():
        clock.idle(2 * MS, ready=MS)
    measured.end_step()
    assert clock.num_asked == asked_before + 2
    assert blocked(measured)[Activity.BACKWARD] == MS // 2
    assert spans(measured)[Activity.PROCESSOR] == MS


def test_a_simulated_rank_is_never_blocked_where_it_was_ready_between_two_turns(
    clock: Clock,
) -> None:
    rank = RankTime(clock=clock, takes_turns=True)
    start(rank, clock)
    with waiting():
        clock.ready += 7 * MS  # the clock stands
        clock.now += 2 * MS
    with rank_time.during(Activity.LOADING):
        clock.idle(5 * MS)
    rank.end_step()
    rank.stop()
    assert blocked(rank) == {Activity.LOADING: 5 * MS}


def test_a_rank_that_computes_a_little_at_a_time_is_not_blocked_in_it() -> None:
    rank = RankTime()
    rank.start()
    for _ in range(20):
        time.sleep(0.001)
        with rank_time.during(Activity.BACKWARD):
            start_s = time.perf_counter()
            while time.perf_counter() - start_s < 0.001:
                pass  # a question for the processor time would bring the kernel up to date
        rank.end_step()
    rank.stop()
    steps = RankSteps.of(0, rank.rows.numbers()).steps.values()
    assert median(step.blocked_ns[Activity.BACKWARD] for step in steps) < 0.2 * MS
    assert median(step.spans_ns[Activity.BACKWARD] for step in steps) > 0.2 * MS


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
