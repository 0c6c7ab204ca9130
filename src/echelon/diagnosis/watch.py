"""What a process tells of itself in the logbook of its host, and finds out about the others."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self, final

from echelon.diagnosis import stacks
from echelon.diagnosis.flight_recorder import VARIABLE, FlightRecorder, Phase, RankStatus
from echelon.diagnosis.hang import SilentRank, explained, finding_of
from echelon.errors import CommTimeout, RankFailed
from echelon.process.forks import disown_in_forks
from echelon.process.process_status import activity

if TYPE_CHECKING:
    from echelon.diagnosis.collective_call import CollectiveCall
    from echelon.process.environment import JobEnvironment

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LEADER_S = 5.0  # what the first rank of a host gets to make the logbook, when all have met


class Store(Protocol):
    """Where ranks leave notes for each other; every store of ``torch.distributed`` is one."""

    def set(self, key: str, value: str) -> None:
        """Leave a note."""

    def get(self, key: str) -> bytes:
        """Read a note; waits until it is there."""

    def check(self, keys: list[str]) -> bool:
        """Whether notes are there."""


def _opened(path: str, job: JobEnvironment) -> FlightRecorder | None:
    """The logbook of ``path``; None where it is out of reach, and a rank can do without."""
    try:
        logbook = FlightRecorder.open(path)
    except OSError:  # of a process in another container
        return None
    return logbook if job.local_rank < len(logbook.pages) else None


@final
class Watch:
    """One rank's page in the logbook of its host, and its view of the other pages.

    Args:
        logbook: of the ranks of this host.
        index: of this rank's page.
        rank: in the job.
        attempt: how often the launcher has restarted the job.

    Attributes:
        is_shared: whether the other ranks of the host have their pages in the same logbook.
    """

    def __init__(self, logbook: FlightRecorder, index: int, rank: int, attempt: int = 0) -> None:
        self.rank = rank
        self.is_shared = True
        self._attempt = attempt
        self._timeout_s = 0.0
        self._awaited: dict[int, int] = {}  # the rank for which each thread waits
        self._lock = threading.Lock()
        disown_in_forks(self)
        self._enter(logbook, index)

    @classmethod
    def alone(cls, rank: int, attempt: int = 0) -> Self:
        """A watch that knows of no other rank."""
        watch = cls(FlightRecorder.private(), 0, rank, attempt)
        watch.is_shared = False
        return watch

    @classmethod
    def of_job(cls, job: JobEnvironment, environ: Mapping[str, str]) -> Self:
        """The watch of a rank of ``job``, in the logbook of its launcher if that has one."""
        path = environ.get(VARIABLE)
        logbook = _opened(path, job) if path else None
        if logbook is None:
            return cls.alone(job.rank, job.attempt)
        return cls(logbook, job.local_rank, job.rank, job.attempt)

    def share(self, job: JobEnvironment, store: Store) -> None:
        """Have one logbook for all ranks of this host, if there is none. All ranks call it."""
        if self.is_shared or job.local_size == 1:
            return
        key = f"logbook/{_BOOT.read_text().strip()}"  # another one on every host
        logbook: FlightRecorder | None
        if job.local_rank == 0:
            logbook = FlightRecorder.create(job.local_size)
            store.set(key, logbook.path)
        else:
            end = time.monotonic() + _LEADER_S
            while not store.check([key]):
                if time.monotonic() > end:
                    return
                time.sleep(0.01)
            logbook = _opened(store.get(key).decode(), job)
        if logbook is not None:
            self.is_shared = True
            self._enter(logbook, job.local_rank)

    def disown(self) -> None:
        """Write no more into the page of the rank that has forked this process."""
        self.is_shared = False
        self._logbook = FlightRecorder.private()
        self._page = self._logbook.pages[0]

    def _enter(self, logbook: FlightRecorder, index: int) -> None:
        self._logbook = logbook  # owns the memory
        self._page = logbook.pages[index]
        self._thread = threading.get_ident()
        self._page.enter(self.rank, self._attempt)
        self._page.limit(self._timeout_s)
        if self.is_shared:
            self._page.offer_stacks(stacks.offer())

    # What this rank tells --------------------------------------------------------------------

    def run(self) -> None:
        """Note that this rank has its world."""
        self._page.move(Phase.RUNNING)

    def limit(self, timeout_s: float) -> None:
        """Note how long this rank waits for others in one call, and gets to follow them."""
        self._timeout_s = timeout_s
        self._page.limit(timeout_s)

    def begin_close(self) -> None:
        """Note that this rank issues no more calls, and waits a little for the others."""
        self._page.move(Phase.CLOSING)

    def close(self) -> None:
        """Note that this rank has closed its world."""
        self._page.move(Phase.CLOSED)

    def end_script(self) -> None:
        """Note that the script of this rank has come to its end."""
        self._page.end_script()

    def issue(self, ticket: CollectiveCall) -> None:
        """Note the last call."""
        self._page.issue(ticket)

    def step(self, number: int) -> None:
        """Note how many optimizer steps this rank has made."""
        self._page.step(number)
        # A script takes the signal at its start, so to look ever more rarely is enough.
        if not number & (number - 1) and not stacks.is_ours():
            self._page.offer_stacks(None)

    def await_rank(self, rank: int | None) -> None:
        """Note for whom in the job this thread waits; None: for nobody any more.

        The page has room for one wait: that of the script's thread, or else the one begun first.
        """
        with self._lock:
            if rank is None:
                self._awaited.pop(threading.get_ident(), None)
            else:
                self._awaited[threading.get_ident()] = rank
            first = next(iter(self._awaited.values()), None)
            self._page.await_rank(self._awaited.get(self._thread, first))

    def give_up(self, ranks: Sequence[int]) -> None:
        """Note that this rank has waited in vain for these in the job, until its next call."""
        if ranks:
            self._page.give_up(ranks[0])

    # What it finds out -----------------------------------------------------------------------

    def check(self, doing: str) -> None:
        """Look whether the launcher knows that some rank will never come.

        Raises:
            RankFailed: names it.
        """
        gone = self._page.gone
        if gone is not None:
            raise RankFailed(gone, "ended before it called echelon.init()", doing)

    def entry(self, rank: int) -> RankStatus | None:
        """The page of ``rank`` (in the job); None if it is not on this host."""
        return self.entries().get(rank)

    def entries(self) -> dict[int, RankStatus]:
        """The pages of all ranks of this host that have begun theirs, by rank in the job."""
        return self._logbook.entries(self._attempt)

    def explained(self, error: CommTimeout) -> CommTimeout:
        """``error`` with what the ranks of this host do that hold up the others."""
        if not self.is_shared:
            return error
        entries = self.entries()
        roots = {self._root(rank, entries) for rank in error.missing}
        told = stacks.ask(entries.values())
        known = sorted(roots & set(entries))
        found = [_finding(entries[rank], told.get(rank, [])) for rank in known]
        return explained(error, found, told) if found else error

    def _root(self, rank: int, entries: Mapping[int, RankStatus]) -> int:
        """The rank that ``rank`` waits for, through others that wait, too."""
        seen = {self.rank}
        root = rank
        while root in entries and root not in seen:
            seen.add(root)
            entry = entries[root]
            awaited = entry.gave_up if entry.awaited is None else entry.awaited
            if awaited is None:
                return root
            root = awaited
        return rank if root in seen else root  # in a circle nobody is first


def _finding(entry: RankStatus, stack: Sequence[str]) -> SilentRank:
    """What a page, the kernel and a stack say of a rank."""
    if entry.ended:
        doing = "has ended"
    elif entry.phase >= Phase.CLOSING:
        doing = "has closed its world"
    elif entry.awaited is not None:
        doing = f"waits for rank {entry.awaited}"
    elif entry.gave_up is not None:
        doing = f"has waited in vain for rank {entry.gave_up}"
    else:
        doing = activity(entry.pid, entry.native)
    return finding_of(entry, doing, stack)
