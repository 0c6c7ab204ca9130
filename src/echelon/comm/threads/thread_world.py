"""What the simulated ranks of one process share: who waits for whom, who returned, who failed.

Every communication is a ``Pending`` thing that some ranks still have to come to. Because the
fabric knows who waits for whom, a cycle of waiting ranks, or a wait for a rank that has returned,
is found at once and not by a timeout. A rank that communicates from several threads is never taken
for stuck, because another of its threads may go on; nor is one that waits with its own timeout.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from echelon.diagnosis import stacks
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.diagnosis.failure_record import is_heard
from echelon.diagnosis.root_cause import held_up_by
from echelon.diagnosis.stragglers import ExitSign, ExitStage, StuckRank, error_of, explained
from echelon.errors import CommError, CommTimeout, DeadlockError, RankFailed, StateError
from echelon.errors.message_text import message_of
from echelon.process.process_status import activity


class Pending:
    """Something that is complete when all its ranks have come."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = tuple(expected)  # ranks in the job
        self.absent = set(expected)  # those that have not come
        self.complete = False
        self.error: Exception | None = None


class PendingCollective(Pending):
    """One collective: the call of each rank and what it brought, in rank order.

    While some ranks are absent, their places hold those of the first rank that came.
    """

    def __init__(self, ranks: Sequence[int], call: CollectiveCall, item: Any) -> None:
        super().__init__(ranks)
        self.calls: list[CollectiveCall] = [call] * len(self.expected)
        self.items: list[Any] = [item] * len(self.expected)


class PendingMessage(Pending):
    """One message: a send and a receive that found, or wait for, each other."""

    def __init__(self, expected: Sequence[int]) -> None:
        super().__init__(expected)
        self.sides: dict[
            str, tuple[int, CollectiveCall, Tensor]
        ] = {}  # by op: rank in group, call, tensor


@dataclass(slots=True)
class _Wait:
    """One thread of a rank that waits."""

    pending: Pending
    call: CollectiveCall
    has_own_timeout: bool


@final
@dataclass(slots=True)
class _Sighting:
    """Where a rank was seen last.

    Attributes:
        thread: Python's number of its thread; 0 before it runs.
        native_id: the kernel's number of that thread.
        step: optimizer steps that it has made.
        call: its last call.
    """

    thread: int = 0
    native_id: int = 0
    step: int = 0
    call: CollectiveCall | None = None

    def note_step(self, number: int) -> None:
        """Note how many optimizer steps it has made."""
        self.step = number

    def stack(self) -> list[str]:
        """The innermost line last."""
        return stacks.of_this_process(self.thread)

    def finding(self, rank: int) -> StuckRank:
        """What is known of it now, where it does not wait."""
        return StuckRank(
            rank=rank,
            where=f"at step {self.step}",
            activity=activity(os.getpid(), self.native_id),
            call="" if self.call is None else str(self.call),
            stack=self.stack(),
            silence="its thread has ended",
        )


@final
class ThreadWorld:
    """What the simulated ranks of one job share: who waits, who returned, who failed.

    Args:
        size: number of ranks in the job.
        timeout: seconds that a rank waits for others by default.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.sightings = [_Sighting() for _ in range(size)]
        self.lock = threading.Lock()
        self.meetings: dict[tuple[str, int], PendingCollective] = {}
        self.mail: dict[tuple[str, int, int, int], deque[PendingMessage]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self._wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self._waits: list[dict[int, _Wait]] = [{} for _ in range(size)]  # by rank, by thread
        self._gave_up: dict[int, Pending] = {}  # what a rank waited for in vain, in its last call
        self._threads: list[set[int]] = [set() for _ in range(size)]  # that have ever waited
        self._finished: set[int] = set()

    def enter(self, rank: int) -> None:
        """Note on which thread a rank runs: the one that calls this."""
        sighting = self.sightings[rank]
        sighting.thread, sighting.native_id = threading.get_ident(), threading.get_native_id()

    def note(self, call: CollectiveCall) -> None:
        """Note the last call of a rank."""
        self.sightings[call.rank].call = call
        if self._gave_up:
            self._gave_up.pop(call.rank, None)

    def finish(self, rank: int) -> None:
        """Note that a rank has returned, or closed its world; it never answers again."""
        with self.lock:
            self._finished.add(rank)
            if any(rank in wait.pending.absent for wait in self._all_waits()):
                self._declare_deadlock(rank)

    def sign(self, rank: int, runs: bool) -> ExitSign:
        """What is seen of a rank now; ``runs``: its thread has not ended."""
        with self.lock:
            seen, waits = self.sightings[rank], bool(self._waits[rank])
            stage = ExitStage.CLOSED if rank in self._finished else ExitStage.RUNNING
            call = None if seen.call is None else (seen.call.group, seen.call.position)
            return ExitSign(
                stage=stage if runs else ExitStage.ENDED,
                progress=(seen.step, call, waits),
                waits=waits,
            )

    def straggler_error(self, late: Sequence[int]) -> CommTimeout:
        """The error for ranks that do not follow those that have left."""
        return error_of([self.sightings[rank].finding(rank) for rank in late], self.timeout)

    def fail(self, rank: int, error: BaseException) -> None:
        """Note the first failure and wake all ranks, so that they end too."""
        with self.lock:
            self._fail(rank, error)

    def complete(self, pending: Pending) -> None:
        """Wake the ranks that wait for ``pending``."""
        with self.lock:
            pending.complete = True
            for rank in pending.expected:
                waits = self._waits[rank]
                for thread, wait in list(waits.items()):
                    if wait.pending is pending:
                        del waits[thread]
                        self._wakeups[rank].notify_all()

    def wait(self, pending: Pending, call: CollectiveCall, timeout: float | None) -> None:
        """Block the calling rank until ``pending`` is complete.

        Raises:
            CollectiveMismatch: the ranks that came do not agree.
            RankFailed: another rank failed.
            DeadlockError: no rank that is waited for can come.
            CommTimeout: time is up.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        rank, thread = call.rank, threading.get_ident()
        with self.lock:
            self._threads[rank].add(thread)
            while not pending.complete:
                self.raise_failure(call)
                wait = self._waits[rank][thread] = _Wait(pending, call, timeout is not None)
                if self._is_stuck(rank, wait):
                    self._declare_deadlock(rank)
                    continue
                if not self._wakeups[rank].wait(deadline - time.monotonic()):
                    self._waits[rank].pop(thread, None)
                    if not pending.complete:
                        self._gave_up[rank] = pending
                        late = sorted(pending.absent)
                        error = CommTimeout(str(call), late, seconds, self._others(rank))
                        # Who has a timeout of his own may wait again.
                        raise self._explained(error, rank) if timeout is None else error
        if pending.error is not None:
            raise copy.copy(pending.error)  # each rank gets its own traceback

    def admit(self, call: CollectiveCall) -> None:
        """Refuse a call of a rank whose world has ended; the caller holds the lock.

        Raises:
            StateError: its world was closed.
            RankFailed, DeadlockError: a rank failed.
        """
        if call.rank in self._finished and self.failure is None:
            raise StateError(f"{call} was issued after its world was closed")
        self.raise_failure(call)

    def raise_failure(self, call: CollectiveCall) -> None:
        """Raise if a rank failed; the caller holds the lock."""
        if self.failure is None:
            return
        self._waits[call.rank].pop(threading.get_ident(), None)
        rank, error = self.failure
        if isinstance(error, DeadlockError):
            raise copy.copy(error)
        cause = f"raised {type(error).__name__}: {message_of(error)}"
        raise RankFailed(rank, cause, str(call)) from error

    def _fail(self, rank: int, error: BaseException) -> None:
        heard = self.failure is not None and is_heard(self.failure[1], self.failure[0])
        if self.failure is None or (heard and not isinstance(error, CommError)):
            self.failure = (rank, error)  # not the rank that only heard of it
        for wakeup in self._wakeups:
            wakeup.notify_all()

    def _all_waits(self) -> Iterator[_Wait]:
        return (wait for waits in self._waits for wait in waits.values())

    def _is_stuck(self, start: int, wait: _Wait) -> bool:
        """Whether ``start`` waits for itself through others, or for a rank that has returned.

        A rank needs everyone it waits for, so one cycle is enough for a deadlock.
        """
        if not self._finished.isdisjoint(wait.pending.absent):
            return True
        seen: set[int] = set()
        stack = [start]
        while stack:
            rank = stack.pop()
            if len(self._threads[rank]) > 1:
                continue  # another of its threads may go on
            for found in self._waits[rank].values():
                if found.pending.complete or found.has_own_timeout:
                    continue
                absent = found.pending.absent
                if start in absent or not self._finished.isdisjoint(absent):
                    return True
                stack.extend(absent - seen)
                seen |= absent
        return False

    def _declare_deadlock(self, rank: int) -> None:
        waits = {
            wait.call.rank: (str(wait.call), sorted(wait.pending.absent))
            for wait in self._all_waits()
        }
        self._fail(rank, DeadlockError(waits, self._finished))

    def _explained(self, error: CommTimeout, reporter: int) -> CommTimeout:
        """``error`` with what the ranks do that hold up the others; the caller holds the lock."""
        waits = {rank: self._waited_for(rank) for rank in range(self.size)}
        roots = {held_up_by(rank, waits, reporter=reporter) for rank in error.missing}
        known_stacks = {rank: sighting.stack() for rank, sighting in enumerate(self.sightings)}
        return explained(
            error,
            [self.sightings[rank].finding(rank) for rank in sorted(roots)],
            {rank: stack for rank, stack in known_stacks.items() if stack},
        )

    def _waited_for(self, rank: int) -> int | None:
        """The rank that ``rank`` waits for, or has waited for in vain; None if it does not wait."""
        pending = next((wait.pending for wait in self._waits[rank].values()), None)
        pending = pending or self._gave_up.get(rank)
        return None if pending is None else min(pending.absent, default=None)

    def _others(self, reporter: int) -> str:
        """What the other ranks wait for, for the message of a timeout of ``reporter``."""
        waits = (wait for wait in self._all_waits() if wait.call.rank != reporter)
        return "\n".join(f"  rank {wait.call.rank} waits in {wait.call}" for wait in waits)
