"""What a rank spends its time on, which the rank measures itself, all the time.

A rank is always busy with one ``Activity``. Whoever begins another says so, and what is nested is
not counted twice::

    OTHER  │ LOADING │ OTHER │ FORWARD   │ BACKWARD             │ OPTIMIZER │ OTHER
                                              COMMUNICATION                  ▲ end of the step

Time in which the rank was ready to run and the kernel ran something else counts as ``PROCESSOR``,
because on a busy machine it comes to every rank by turns, and says nothing about the rank. So do
garbage collections of a process with several ranks: they all leave garbage, and the rank that
happens to start the collection is busy with that of all.

Only the thread of the rank is measured; on other threads these functions do nothing. To change the
activity costs 0.3 µs. How long the thread has run is read at most once in ``_READ_NS``, and at the
end of a step, which costs 1 µs. To read how long it was ready costs ten times as much, so that is
read only where there is idle time to divide.

[Note: idle time]
[1] Between two readings the rank was idle as long as its clock went on and its thread did not run:
it was ready without a processor, or it was blocked. In 10 ms of which it has run 7, it was idle for
3 ms. [2] Whoever blocks for long causes a reading, so idle time belongs to the span that ends with
the reading, except for what was in communication, where ranks block by design. [3] The kernel says
how long the thread was ready. As much of the idle time is ``PROCESSOR``, and not more: a rank that
takes turns is also ready while its clock stands, until the kernel lets it begin its turn. [4] Ranks
that do not take turns ask only about idle times that are long enough. A shorter one counts as
communication or as blocked, and what they were ready in it counts with the next longer one.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from echelon.diagnosis.arrivals import Arrivals
from echelon.diagnosis.step_rows import Activity, StepRows
from echelon.process.forks import disown_in_forks
from echelon.process.this_rank import here

if TYPE_CHECKING:
    from echelon.diagnosis.collective_call import CollectiveCall

COMMUNICATION = int(Activity.COMMUNICATION)  # to look up a member takes longer than to add
_OTHER, _FORWARD, _BACKWARD = int(Activity.OTHER), int(Activity.FORWARD), int(Activity.BACKWARD)
_PROCESSOR, _BEFORE_BACKWARD = int(Activity.PROCESSOR), int(Activity.BEFORE_BACKWARD)
# They interrupt a forward; all others show that it has ended.
_INTERRUPTIONS = frozenset({COMMUNICATION, int(Activity.COLLECTING), _PROCESSOR})
_NONE_YET = [0] * len(Activity)
NOTHING = -1  # what ``begin`` gives where no rank is measured
_READ_NS = 1_000_000  # between two readings of the processor time
_IDLE_NS, _IDLE_IN_COMMUNICATION_NS = 100_000, 1_000_000  # from which on the kernel is asked
# Both clocks are read again, at most so often, if more time than this lies between the two.
_FIT_NS, _MOST_READS = 50_000, 5

if sys.platform == "linux":
    from resource import RUSAGE_THREAD, getrusage

    def page_faults() -> tuple[int, int]:
        """Page faults of this thread: minor ones, and those that have waited for a disk."""
        usage = getrusage(RUSAGE_THREAD)
        return usage.ru_minflt, usage.ru_majflt

else:

    def page_faults() -> tuple[int, int]:
        """Page faults of a thread are counted by Linux alone."""
        return 0, 0


@final
class KernelTimes:
    """What the kernel counts of the thread that makes this object."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:  # a kernel that does not count, or no Linux
            self._file = -1

    # Nanoseconds on a processor. The file has them, too, but as of its last tick, up to 10 ms ago.
    ran_ns = staticmethod(time.thread_time_ns)

    def ready_ns(self) -> int:
        """Nanoseconds ready to run without a processor; 0 if the kernel does not count them."""
        return 0 if self._file < 0 else int(os.pread(self._file, 80, 0).split()[1])

    def close(self) -> None:
        """Close the kernel's file."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


@final
class RankTime:
    """The clock of one rank: what it does now, and for how long it has done what in this step.

    Args:
        rows: where each step goes.
        clock: nanoseconds in which the rank ran or waited.
        takes_turns: whether it is simulated: its clock stands while it waits for its turn, and it
            shares the heap of Python with other ranks.

    Attributes:
        arrivals: when the rank came to its last collectives.
        collecting: the activity that a garbage collection counts as.
        before_step: what the step of an optimizer interrupts.
        before_collection: what a garbage collection interrupts.
    """

    def __init__(
        self,
        rows: StepRows | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        *,
        takes_turns: bool = False,
    ) -> None:
        self.rows = StepRows.private() if rows is None else rows
        self.collecting = Activity.PROCESSOR if takes_turns else Activity.COLLECTING
        # Ranks that take turns are often ready while their clocks stand.
        self._least_idle_ns = (0, 0) if takes_turns else (_IDLE_NS, _IDLE_IN_COMMUNICATION_NS)
        self._clock = clock
        self._kernel: KernelTimes | None = None
        self._activity = _OTHER
        self._mark = self._step_mark = self._read_mark = 0
        self._ran_mark = self._ready_mark = 0
        self._known_waits = 0  # in communication in this step, as of the last reading
        self._faults = 0, 0
        self._saw_forward = False
        # What was done for longest since the last collective.
        self._longest_ns, self._longest = 0, _OTHER
        self.before_step = self.before_collection = _OTHER
        self._interrupted = _OTHER  # by the communication that is under way, or was the last
        self.arrivals = Arrivals()
        self._begin_row()

    def _begin_row(self) -> None:
        """Count from nothing, for the next step."""
        self._spans, self._blocked = _NONE_YET.copy(), _NONE_YET.copy()
        self._known_waits = 0

    def start(self) -> None:
        """Measure the calling thread from now on, with an empty table."""
        self.stop()
        self.rows.clear()
        self.arrivals.clear()
        self._kernel = KernelTimes()
        self._activity = _OTHER
        self._mark = self._step_mark = self._read_kernel(self._clock())
        self._ready_mark = self._kernel.ready_ns()
        self._begin_row()
        self._faults = page_faults()
        here.time = self
        disown_in_forks(self)

    def stop(self) -> None:
        """Measure no more."""
        if here.time is self:
            here.time = None
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = None

    def disown(self) -> None:
        """Write no more into the table of the rank that has forked this process."""
        self.rows = StepRows.private()
        self.stop()

    def begin(self, activity: int) -> int:
        """Begin an activity; the result is the one before, for ``end``."""
        before = self._activity
        if activity == before:
            return before
        self._switch(activity)
        if before == _FORWARD and activity not in _INTERRUPTIONS:
            before = _OTHER
        if activity == _FORWARD:
            self._saw_forward = True
        elif activity == _BACKWARD and not self._saw_forward:
            self._spans[_BEFORE_BACKWARD] += self._spans[_OTHER]
            self._spans[_OTHER] = 0
        return before

    def begin_call(self) -> int:
        """``begin`` for communication, which every call of a group pays for."""
        before = self._activity
        if before != COMMUNICATION:
            self._interrupted = before
            self._switch(COMMUNICATION)
        return before

    def begin_stages(self) -> int:
        """``begin`` for the stages of a pipeline, each of whose actions begins its own activity."""
        self.rows.call_stage()
        return self.begin(_OTHER)

    @property
    def before_call(self) -> int:
        """What the rank does apart from communication."""
        return self._interrupted if self._activity == COMMUNICATION else self._activity

    def end(self, before: int) -> None:
        """End an activity, and go back to the one before."""
        if before != self._activity:
            self._switch(before)

    def begin_forward(self) -> None:
        """Begin a forward, which lasts until something else begins that it does not contain."""
        self._saw_forward = True
        if self._activity == _OTHER:
            self._switch(_FORWARD)

    def end_forward(self) -> None:
        """End a forward that no backward follows."""
        if self._activity == _FORWARD:
            self._switch(_OTHER)

    def arrive(self, call: CollectiveCall) -> None:
        """Note that the rank has come to a collective."""
        self.arrivals.add((call, self._mark, self._longest))
        self._longest_ns, self._longest = 0, _OTHER

    def arrive_late(self) -> None:
        """Note that the rank comes only now to the collective to which it came last."""
        self.arrivals.postpone(self._mark, self._longest)
        self._longest_ns, self._longest = 0, _OTHER

    def end_step(self) -> None:
        """Append the times of this step to ``rows``."""
        self.read_kernel()
        minor, major = self._faults
        self._faults = page_faults()
        wall = self._mark - self._step_mark
        self._step_mark = self._mark
        spans = self._spans
        if min(spans) < 0:
            spans = [max(0, span) for span in spans]
        minor, major = self._faults[0] - minor, self._faults[1] - major
        self.rows.add((wall, *spans, *self._blocked, minor, major))
        self._saw_forward = False
        self._begin_row()

    def read_kernel(self) -> None:
        """Count now what the kernel has counted so far."""
        self._read_kernel(self._clock())
        self._switch(self._activity)

    def _switch(self, activity: int) -> None:
        """Add the time since the last change to the activity that ends, and begin another."""
        now = self._clock()
        if now - self._read_mark > _READ_NS:
            now = self._read_kernel(now)
        elapsed, before = now - self._mark, self._activity
        self._spans[before] += elapsed
        if elapsed > self._longest_ns and before != COMMUNICATION:
            self._longest_ns, self._longest = elapsed, before
        self._mark = now
        self._activity = activity

    def _read_kernel(self, now: int) -> int:
        """Count what the kernel has counted; when that was.

        Where the kernel runs something else between the two readings, they do not fit each other.
        """
        kernel = self._kernel
        if kernel is None:  # stopped meanwhile, as in a process that this rank has forked
            return now
        for _ in range(_MOST_READS):
            before, ran, now = now, kernel.ran_ns(), self._clock()
            if now - before < _FIT_NS:
                break
        elapsed, span, activity = now - self._read_mark, now - self._mark, self._activity
        # See [Note: idle time].
        waits = self._spans[COMMUNICATION]
        idle = elapsed - (ran - self._ran_mark) - (waits - self._known_waits)
        idle = min(max(0, idle), span)
        self._ran_mark, self._read_mark = ran, now
        if idle >= self._least_idle_ns[activity == COMMUNICATION]:
            ready_before, self._ready_mark = self._ready_mark, kernel.ready_ns()
            ready = min(self._ready_mark - ready_before, idle)
            self._spans[activity] -= ready
            self._spans[_PROCESSOR] += ready
            idle -= ready
        self._blocked[activity] += idle
        self._known_waits = self._spans[COMMUNICATION] + (span if activity == COMMUNICATION else 0)
        return now


def current() -> RankTime | None:
    """The clock of the rank that runs on this thread."""
    rank_time: RankTime | None = here.time
    return rank_time


def rows() -> StepRows | None:
    """The table of the rank on this thread; None if it is not measured."""
    rank_time: RankTime | None = here.time
    return None if rank_time is None else rank_time.rows


def arrive(call: CollectiveCall) -> None:
    """Note that the rank on this thread has come to a collective."""
    rank_time: RankTime | None = here.time
    if rank_time is not None:
        rank_time.arrive(call)


def arrive_late() -> None:
    """Note that the rank on this thread comes only now to its last collective."""
    rank_time: RankTime | None = here.time
    if rank_time is not None:
        rank_time.arrive_late()


def begin(activity: int) -> int:
    """Begin an activity of the rank on this thread; the result is for ``end``."""
    rank_time: RankTime | None = here.time
    return NOTHING if rank_time is None else rank_time.begin(activity)


def end(before: int) -> None:
    """End the activity for which ``begin`` gave ``before``."""
    rank_time: RankTime | None = here.time
    if rank_time is not None and before != NOTHING:
        rank_time.end(before)


@contextmanager
def before_communication() -> Iterator[None]:
    """Count the body, which delays a call, as the activity before the call."""
    rank_time = current()
    with during(Activity.OTHER if rank_time is None else Activity(rank_time.before_call)):
        yield


@contextmanager
def during(activity: Activity) -> Iterator[None]:
    """Count the body as this activity."""
    before = begin(activity)
    try:
        yield
    finally:
        end(before)


def begin_forward() -> None:
    """Begin a forward of a model with gradients, which ends where something else begins."""
    rank_time: RankTime | None = here.time
    if rank_time is not None:
        rank_time.begin_forward()


def end_forward() -> None:
    """End a forward that no backward follows."""
    rank_time: RankTime | None = here.time
    if rank_time is not None:
        rank_time.end_forward()
