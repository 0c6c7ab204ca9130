"""What the groups of a job share on one rank: its store, its failure records, its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar, final

from torch._C import _distributed_c10d as c10d

from echelon.comm.torch_dist.peers import PeerLost
from echelon.comm.torch_dist.stall_watch import StallWatch
from echelon.diagnosis.failure_record import FailureRecord, Reason
from echelon.diagnosis.flight_recorder import Phase
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.diagnosis.root_cause import peer_failure
from echelon.errors import CommError, CommTimeout, RankFailed
from echelon.process import time_limits
from echelon.process.background_threads import answer_of
from echelon.process.forks import disown_in_forks, keep_alive

_T = TypeVar("_T")

_MAX_MESSAGE = 2000  # characters, of a record in the store


@final
class Job:
    """What the groups of one rank share.

    Args:
        store: shared by all ranks; this object writes under ``failure/`` and ``closed/`` only.
        monitor: of this rank.
        size: number of ranks that this rank holds the store for; 0 if another one holds it.
    """

    def __init__(self, store: c10d.Store, monitor: RankMonitor, size: int = 0) -> None:
        self.store = store
        self.monitor = monitor
        self.rank = monitor.rank
        self._num_ranks = self._stay_for = size
        self._store_gone = False
        self.failure: CommError | None = None
        self._lock = threading.Lock()
        self._posted = False
        self._is_closed = False
        self._sever: list[Callable[[], None]] = []
        self._drop: list[Callable[[bool], None]] = []
        self.stalls = StallWatch(self.rank, store)
        disown_in_forks(self)

    def disown(self) -> None:
        """Leave the store to the rank that has forked this process."""
        keep_alive(self.store)

    def join(self, sever: Callable[[], None], drop: Callable[[bool], None]) -> None:
        """Add a group.

        Args:
            sever: breaks its connections, so that no rank waits for this one.
            drop: ends its work and drops its engine; the argument says whether the job failed.
        """
        with self._lock:
            self._sever.append(sever)
            self._drop.append(drop)

    def check(self) -> None:
        """Raise the first failure of this rank again: connections do not survive one."""
        if self.failure is not None:
            raise self.failure

    def look(self, ranks: Sequence[int]) -> None:
        """Raise ``PeerLost`` if ranks in the job have ended; it names their places in ``ranks``."""
        ended = [
            i
            for i, rank in enumerate(ranks)
            if self._has_ended(rank) or self._ask(partial(self.store.check, [f"failure/{rank}"]))
        ]
        if ended:
            raise PeerLost(tuple(ended), late=False)

    def diagnose(self, report: FailureRecord, ranks: Sequence[int]) -> CommError:
        """Find out who failed, tell the other ranks, and break all connections of this rank.

        Args:
            report: what happened on this rank.
            ranks: of the group, in the job.

        Returns:
            what to raise: the first failure of this rank, if it has failed before.
        """
        try:
            return self._diagnose(report, ranks)
        finally:
            self.monitor.wait_for(None)  # only now, or it would look as if this rank computed

    def _diagnose(self, report: FailureRecord, ranks: Sequence[int]) -> CommError:
        with self._lock:
            if self.failure is not None:
                return self.failure
            # A rank that knows which peer it lost can say more after it has read the peer's record.
            knows_more_later = report.reason is Reason.LOST and bool(report.missing)
            if not knows_more_later:
                self._post(report)
            if report.reason is Reason.TIMEOUT:
                self.monitor.give_up(report.missing)
            others = [rank for rank in ranks if rank != self.rank]
            start_s = time.monotonic()
            last = False
            while True:
                records = self._ask(lambda: self._read(others)) or {}
                ended = {rank: self._has_ended(rank) for rank in report.missing}
                alive = [rank for rank, has_ended in ended.items() if has_ended is False]
                waited_s = time.monotonic() - start_s
                error, is_final = peer_failure(
                    report,
                    records,
                    tuple(ranks),
                    store_is_gone=self._store_gone,
                    alive=alive,
                    seconds=waited_s,
                )
                grace_s = time_limits.READ_RECORDS_S
                if knows_more_later:
                    grace_s = time_limits.READ_RECORD_OF_LOST_S
                if knows_more_later and alive:
                    grace_s = time_limits.READ_RECORD_OF_LIVING_S
                if is_final or self._store_gone or last or waited_s > grace_s:
                    break
                # A rank that has ended writes no more, but may have written since the last read.
                last = bool(ended) and all(ended.values())
                time.sleep(0.0 if last else 0.05)
            if isinstance(error, CommTimeout):
                error = self.monitor.explained(error)
            self.failure = error
            if isinstance(error, RankFailed):
                self._stay_for -= error.failed_rank not in records  # it will not close its job
                report = replace(report, failed_rank=error.failed_rank, cause=error.cause)
            elif isinstance(error, CommTimeout):
                self._stay_for -= len(error.missing)
            self._post(report)
            sever = list(self._sever)
        for step in sever:
            step()
        return error

    def give_up(self, error: CommError, report: FailureRecord) -> None:
        """Have this rank fail with ``error``, tell the others, and break all its connections."""
        with self._lock:
            if self.failure is None:
                if isinstance(error, CommTimeout):
                    self.monitor.give_up(error.missing)
                    error = self.monitor.explained(error)
                    self._stay_for -= len(error.missing) if isinstance(error, CommTimeout) else 0
                self.failure = error
                self._post(report)
            sever = list(self._sever)
        for step in sever:
            step()

    def close(self, error: BaseException | None) -> None:
        """End all groups of this rank and tell the others why. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if error is not None:
                record = FailureRecord.of(error, self.rank)
                short = record.message[:_MAX_MESSAGE]
                self._post(replace(record, message=short, traceback="", stacks=""))
            else:
                self._post(FailureRecord(rank=self.rank, reason=Reason.LEFT))
            failed = error is not None or self.failure is not None
        self.stalls.end(failed=failed)
        if failed:
            for step in self._sever:
                step()
        for drop in reversed(self._drop):
            drop(failed)
        self._sever.clear()
        self._drop.clear()
        self.monitor.set_phase(Phase.CLOSING)
        self._ask(lambda: self.store.set(f"closed/{self.rank}", ""))
        self._keep_store(failed)
        self.monitor.set_phase(Phase.CLOSED)

    def _keep_store(self, failed: bool) -> None:
        """Wait for the ranks that may yet read the store, if this one holds it."""
        waiting = set(range(self._num_ranks)) if self._stay_for > 0 else set()
        start_s = time.monotonic()
        while self._num_ranks - len(waiting) < self._stay_for:
            waited_s = time.monotonic() - start_s
            if waited_s > time_limits.CLOSE_WORLD_S:
                break
            # A rank that lives on a busy host has perhaps yet to hear of the failure.
            if failed and waited_s > time_limits.CLOSE_FAILED_WORLD_S and not self._lives(waiting):
                break
            closed = self._ask(partial(self._closed, frozenset(waiting)))
            if closed is None:
                break
            waiting -= closed
            time.sleep(0.02 if waiting else 0.0)

    def _lives(self, ranks: Collection[int]) -> bool:
        """Whether the process of one of them is known to live."""
        return any(self._has_ended(rank) is False for rank in ranks if rank != self.rank)

    def _closed(self, ranks: Collection[int]) -> set[int]:
        return {rank for rank in ranks if self.store.check([f"closed/{rank}"])}

    def _has_ended(self, rank: int) -> bool | None:
        """Whether the process of a rank has ended; None where that cannot be seen from here."""
        entry = self.monitor.status(rank)
        return None if entry is None else entry.ended

    def _post(self, record: FailureRecord) -> None:
        """Write the first record of this rank; later ones are its consequences."""
        if not self._posted:
            self._posted = True
            self._ask(lambda: self.store.set(f"failure/{self.rank}", record.dump()))

    def _read(self, ranks: Sequence[int]) -> dict[int, FailureRecord]:
        keys = {rank: f"failure/{rank}" for rank in ranks}
        return {
            rank: record
            for rank, key in keys.items()
            if self.store.check([key])
            and (record := FailureRecord.load(self.store.get(key), rank)) is not None
        }

    def _ask(self, question: Callable[[], _T]) -> _T | None:
        """The store's answer; None if the store is gone or silent, from then on."""
        if self._store_gone:
            return None
        answers: list[_T] = []
        with suppress(RuntimeError):  # the store's host is gone, and the records with it
            answers = answer_of(question, time_limits.STORE_S)
        if not answers:
            self._store_gone = True
            return None
        return answers[0]
