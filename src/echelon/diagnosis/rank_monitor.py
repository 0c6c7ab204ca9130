"""A rank's access to the flight recorder: it writes its own record and reads those of others."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, final
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from echelon.checks import integer
from echelon.diagnosis import activity_hooks, stacks
from echelon.diagnosis.flight_recorder import VARIABLE, FlightRecorder, Phase, RankStatus
from echelon.diagnosis.rank_time import RankTime
from echelon.diagnosis.root_cause import end_of_wait_chain
from echelon.diagnosis.step_rows import StepRows
from echelon.diagnosis.stuck_ranks import StuckRank, explained
from echelon.errors import CommTimeout, DeadlockError, RankFailed
from echelon.process.forks import ForkMark, disown_in_forks, mark
from echelon.process.this_rank import here

if TYPE_CHECKING:
    from echelon.diagnosis.collective_call import CollectiveCall
    from echelon.process.environment import JobEnvironment

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LEADER_S = 5.0  # for the first rank of a host to make the flight recorder, after all have met


class Store(Protocol):
    """The methods that this module uses of a store of ``torch.distributed``."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Read a value, after waiting until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""


def _opened(path: str, job: JobEnvironment) -> FlightRecorder | None:
    """The recorder of ``path``; None if it is out of reach, because a rank can do without."""
    try:
        recorder = FlightRecorder.open(path)
    except OSError:  # of a process in another container
        return None
    return recorder if job.local_rank < len(recorder.rank_records) else None


@final
class RankMonitor:
    """One rank's record in the flight recorder of its host, and its view of the other records.

    Args:
        recorder: of the ranks of this host.
        index: of this rank's record.
        rank: in the job.
        attempt: how often the launcher has restarted the job.

    Attributes:
        is_shared: whether the other ranks of the host have their records in the same recorder.
    """

    def __init__(self, recorder: FlightRecorder, index: int, rank: int, attempt: int = 0) -> None:
        self.rank = rank
        self.is_shared = True
        self._attempt = attempt
        self._timeout_s = 0.0
        self._waits_for: dict[int, int] = {}  # the rank for which each thread waits
        self._lock = threading.Lock()
        disown_in_forks(self)
        self._enter(recorder, index)

    @classmethod
    def alone(cls, rank: int, attempt: int = 0) -> Self:
        """A monitor that sees no other rank."""
        monitor = cls(FlightRecorder.private(), 0, rank, attempt)
        monitor.is_shared = False
        return monitor

    @classmethod
    def of_job(cls, job: JobEnvironment, environ: Mapping[str, str]) -> RankMonitor:
        """The monitor of a rank of ``job``, in the recorder of its launcher if that has one.

        A process has one, also if its program enters a world by several ways: two would write over
        each other's texts.
        """
        path = environ.get(VARIABLE)
        key = (path, job.rank, job.attempt, mark())
        if path and (known := _of_launcher.get(key)) is not None:
            return known
        recorder = _opened(path, job) if path else None
        if recorder is None:
            return cls.alone(job.rank, job.attempt)
        monitor = _of_launcher[key] = cls(recorder, job.local_rank, job.rank, job.attempt)
        return monitor

    def share(self, job: JobEnvironment, store: Store) -> None:
        """Move to one flight recorder for all ranks of this host. All ranks call it."""
        if self.is_shared or job.local_size == 1 or sys.platform != "linux":
            return
        key = f"flight_recorder/{_BOOT.read_text().strip()}"  # different on every host
        recorder: FlightRecorder | None
        if job.local_rank == 0:
            recorder = FlightRecorder.create(job.local_size)
            store.set(key, recorder.path)
        else:
            end = time.monotonic() + _LEADER_S
            while not store.check([key]):
                if time.monotonic() > end:
                    return
                time.sleep(0.01)
            recorder = _opened(store.get(key).decode(), job)
        if recorder is not None:
            self.is_shared = True
            self._enter(recorder, job.local_rank)

    def disown(self) -> None:
        """Write no more into the record of the rank that has forked this process."""
        self.is_shared = False
        self._recorder = FlightRecorder.private()
        self._record = self._recorder.rank_records[0]

    def _enter(self, recorder: FlightRecorder, index: int) -> None:
        self._recorder = recorder  # owns the memory
        self._record = recorder.rank_records[index]
        self._thread = threading.get_ident()
        self._record.begin(self.rank, self._attempt)
        self._record.step_rows.peers = partial(_step_rows, weakref.ref(recorder), self._attempt)
        self._record.set_timeout(self._timeout_s)
        if self.is_shared:
            self._record.offer_stacks(stacks.offer())

    @property
    def step_rows(self) -> StepRows:
        """Where this rank notes what it did in each step."""
        return self._record.step_rows

    # What this rank writes -------------------------------------------------------------------

    def set_phase(self, phase: Phase) -> None:
        """Record how far this rank has come."""
        self._record.set_phase(phase)

    def set_timeout(self, timeout_s: float) -> None:
        """Record how long this rank waits for others in one call, and has to follow them."""
        self._timeout_s = timeout_s
        self._record.set_timeout(timeout_s)

    def enter_torch(self) -> None:
        """Record that this rank enters its world by ``init_process_group``."""
        self._record.enter_torch()

    def end_script(self) -> None:
        """Record that the script of this rank has ended."""
        self._record.end_script()

    def record_call(self, call: CollectiveCall) -> None:
        """Record the last call."""
        self._record.record_call(call)

    def record_step(self, number: int) -> None:
        """Record how many optimizer steps this rank has made."""
        self._record.record_step(number)
        # A script replaces the signal handler at its start, so rare checks are enough.
        if not number & (number - 1) and not stacks.is_ours():
            self._record.offer_stacks(None)

    def wait_for(self, rank: int | None) -> None:
        """Record the rank in the job that this thread waits for; None: it does not wait.

        The record holds one wait: that of the script's thread, or else the one that began first.
        """
        with self._lock:
            if rank is None:
                self._waits_for.pop(threading.get_ident(), None)
            else:
                self._waits_for[threading.get_ident()] = rank
            first = next(iter(self._waits_for.values()), None)
            by_script = self._thread in self._waits_for
            self._record.wait_for(self._waits_for.get(self._thread, first), by_script=by_script)

    def give_up(self, ranks: Sequence[int]) -> None:
        """Record the first of the ranks that this rank waited for in vain, until its next call."""
        if ranks:
            self._record.give_up(ranks[0], by_script=self._is_script())

    def _is_script(self) -> bool:
        return threading.get_ident() == self._thread

    # What it reads ---------------------------------------------------------------------------

    def check(self, doing: str) -> None:
        """Raise ``RankFailed`` if the launcher knows that some rank will never come."""
        absent = self._record.absent_rank
        if absent is not None:
            status = self.status(self.rank)
            start = "echelon.init()" if status is None else status.start
            raise RankFailed(absent, f"ended before it called {start}", doing)

    def status(self, rank: int) -> RankStatus | None:
        """The status of ``rank`` (in the job); None if it is not on this host."""
        return self.statuses().get(rank)

    def statuses(self) -> dict[int, RankStatus]:
        """The status of each rank of this host that has begun its record, by rank in the job."""
        return self._recorder.statuses(self._attempt)

    def explained(self, error: CommTimeout) -> CommTimeout | DeadlockError:
        """``error`` with what those ranks of this host do that hold up the others.

        Where the scripts of ranks wait for one another, none of them holds up the others.
        """
        if not self.is_shared:
            return error
        statuses = self.statuses()
        if self._is_script() and (circle := wait_circle(self.rank, error.missing, statuses)):
            calls = {rank: (statuses[rank].call, (awaited,)) for rank, awaited in circle.items()}
            return DeadlockError(calls, ())
        waits = {rank: _waited_for(status) for rank, status in statuses.items()}
        roots = {end_of_wait_chain(rank, waits, reporter=self.rank) for rank in error.missing}
        answers = stacks.ask(statuses.values())
        known = sorted(roots & set(statuses))
        stuck = [StuckRank.of(statuses[rank], answers.get(rank, [])) for rank in known]
        return explained(error, stuck, answers) if stuck else error


_of_launcher: dict[tuple[str | None, int, int, ForkMark], RankMonitor] = {}


def wait_circle(
    rank: int, missing: Sequence[int], statuses: Mapping[int, RankStatus]
) -> dict[int, int]:
    """For each rank of a circle of waits that ``rank`` is in, which one its script waits for.

    Empty if there is no circle: where only another thread of a rank waits, its script may go on.
    """
    if not missing:
        return {}
    circle = {rank: missing[0]}
    awaited = missing[0]
    while awaited not in circle:
        status = statuses.get(awaited)
        following = None if status is None or not status.script_waits else _waited_for(status)
        if following is None:
            return {}
        circle[awaited] = following
        awaited = following
    return circle if awaited == rank else {}


def _step_rows(recorder: weakref.ref[FlightRecorder], attempt: int) -> Mapping[int, StepRows]:
    alive = recorder()
    return {} if alive is None else alive.step_rows(attempt)


def _waited_for(status: RankStatus) -> int | None:
    return status.gave_up_on if status.waits_for is None else status.waits_for


@final
class StepCounter:
    """The optimizer steps of one rank.

    A rank may have several optimizers, which all take one step in each step of the training. So
    the number is that of the optimizer that has taken the most steps.

    Args:
        note: called with each new number.
        rows: where it notes what the rank did in each step.
        clock: nanoseconds in which the rank ran or waited.
        takes_turns: whether it is simulated: its clock stands while it waits for its turn, and it
            shares the heap of Python with other ranks.

    Attributes:
        time: measures what the rank does.
    """

    def __init__(
        self,
        note: Callable[[int], None] = lambda number: None,
        rows: StepRows | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        *,
        takes_turns: bool = False,
    ) -> None:
        self._note = note
        self.time = RankTime(rows, clock, takes_turns=takes_turns)
        self._is_measured = False
        self._first = 0
        self._number = 0
        self._taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    @property
    def number(self) -> int:
        """The number of steps so far."""
        return self._number

    @number.setter
    def number(self, number: int) -> None:
        before, self._number = self._number, integer("step", number)
        self._first = self._number
        self._taken.clear()
        if self._is_measured and self._number > before:
            self.time.end_step()
        self._note(self._number)

    def count(self) -> None:
        """Count the steps that optimizers take on this thread from now on."""
        _listen()
        here.steps = self

    def measure(self) -> None:
        """Measure what the rank on this thread does, from now until ``stop``."""
        if not self._is_measured:
            self._is_measured = True
            activity_hooks.install()
            self.time.start()

    def stop(self) -> None:
        """Measure no more."""
        if self._is_measured:
            self._is_measured = False
            self.time.stop()
            activity_hooks.remove()

    def _add(self, optimizer: Optimizer) -> None:
        taken = self._taken.get(optimizer, 0) + 1
        self._taken[optimizer] = taken
        if self._first + taken > self._number:
            self._number = self._first + taken
            if self._is_measured:
                self.time.end_step()
            self._note(self._number)


def counter() -> StepCounter | None:
    """What counts the steps of the rank on this thread; None if nothing does."""
    steps: StepCounter | None = here.steps
    return steps


@cache  # one hook for all ranks of a process, however many worlds it has
def _listen() -> None:
    register_optimizer_step_post_hook(_took_step)


def _took_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if (steps := counter()) is not None:
        steps._add(optimizer)


# A compiled step of an optimizer must not trace the clock. ``torch.compiler.disable`` does the
# same, and imports the compiler, which takes a second.
vars(_took_step)["_torchdynamo_disable"] = True
