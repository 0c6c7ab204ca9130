"""The state that the simulated ranks of one process share: waits, returns and failures.

Every communication is ``Pending`` until all its ranks have joined it. The world knows which rank
waits for which others, so it detects a cycle of waiting ranks, or a wait for a rank that has
returned, at once and not by a timeout. A rank that communicates from several threads never counts
as stuck, because another of its threads may proceed; neither does one that waits with a timeout of
its own.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

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
    """A communication that is complete when all its ranks have joined it."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.expected = tuple(expected)  # ranks in the job
        self.absent = set(expected)  # those that have not joined
        self.complete = False
        self.error: Exception | None = None


class PendingCollective(Pending):
    """A collective: the call and the item of each rank, in rank order.

    Places of absent ranks hold the call and the item of the first rank that joined.
    """

    def __init__(self, ranks: Sequence[int], call: CollectiveCall, item: Any) -> None:
        super().__init__(ranks)
        self.calls: list[CollectiveCall] = [call] * len(self.expected)
        self.items: list[Any] = [item] * len(self.expected)


class PendingMessage(Pending):
    """A message: a send and a receive that match; ``sides`` is by the op of the call."""

    def __init__(self, expected: Sequence[int]) -> None:
        super().__init__(expected)
        self.sides: dict[str, MessageSide] = {}


class MessageSide(NamedTuple):
    """The send or the receive of a message; ``rank`` is in the group."""

    rank: int
    call: CollectiveCall
    tensor: Tensor


@dataclass(slots=True)
class _Wait:
    """One thread of a rank that waits."""

    pending: Pending
    call: CollectiveCall
    has_own_timeout: bool


@final
@dataclass(slots=True)
class _Sighting:
    """The last known state of a rank.

    Attributes:
        thread: the identifier of its thread; 0 before it runs.
        native_id: the identifier of this thread in the kernel.
        step: the number of optimizer steps that the rank has made.
        call: the last call of the rank.
    """

    thread: int = 0
    native_id: int = 0
    step: int = 0
    call: CollectiveCall | None = None

    def note_step(self, number: int) -> None:
        """Record how many optimizer steps the rank has made."""
        self.step = number

    def stack(self) -> list[str]:
        """The lines of the stack of the rank, with the innermost one last."""
        return stacks.of_this_process(self.thread)

    def finding(self, rank: int) -> StuckRank:
        """Describe a rank that does not wait."""
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
    """The shared state of the simulated ranks of one job.

    ``timeout`` is the time in seconds that a rank waits for others by default.
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
        self._gave_up: dict[int, Pending] = {}  # by rank whose last call timed out
        self._threads: list[set[int]] = [set() for _ in range(size)]  # that have ever waited
        self._finished: set[int] = set()

    def enter(self, rank: int) -> None:
        """Record that a rank runs on the calling thread."""
        sighting = self.sightings[rank]
        sighting.thread, sighting.native_id = threading.get_ident(), threading.get_native_id()

    def note(self, call: CollectiveCall) -> None:
        """Record the last call of a rank."""
        self.sightings[call.rank].call = call
        if self._gave_up:
            self._gave_up.pop(call.rank, None)

    def finish(self, rank: int) -> None:
        """Record that a rank has returned, or has closed its world."""
        with self.lock:
            self._finished.add(rank)
            if any(rank in wait.pending.absent for wait in self._all_waits()):
                self._declare_deadlock(rank)

    def sign(self, rank: int, runs: bool) -> ExitSign:
        """The state of a rank now; ``runs`` says that its thread has not ended."""
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
        """The error about ranks that still run long after others have left."""
        return error_of([self.sightings[rank].finding(rank) for rank in late], self.timeout)

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure, and wake all ranks so that they end, too."""
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
        """Block the calling thread until ``pending`` is complete, or raise why it cannot be."""
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
                        # A caller with a timeout of its own may wait again.
                        raise self._explained(error, rank) if timeout is None else error
        if pending.error is not None:
            raise copy.copy(pending.error)  # each rank gets its own traceback

    def admit(self, call: CollectiveCall) -> None:
        """Refuse a call of a rank whose world has ended; needs the lock."""
        if call.rank in self._finished and self.failure is None:
            raise StateError(f"{call} was issued after its world was closed")
        self.raise_failure(call)

    def raise_failure(self, call: CollectiveCall) -> None:
        """Raise if a rank has failed; needs the lock."""
        if self.failure is None:
            return
        self._waits[call.rank].pop(threading.get_ident(), None)
        rank, error = self.failure
        if isinstance(error, DeadlockError):
            raise copy.copy(error)
        cause = f"raised {type(error).__name__}: {message_of(error)}"
        raise RankFailed(rank, cause, str(call)) from error

    def _fail(self, rank: int, error: BaseException) -> None:
        is_report = self.failure is not None and is_heard(self.failure[1], self.failure[0])
        if self.failure is None or (is_report and not isinstance(error, CommError)):
            self.failure = (rank, error)  # rather than a rank that reports the failure of another
        for wakeup in self._wakeups:
            wakeup.notify_all()

    def _all_waits(self) -> Iterator[_Wait]:
        return (wait for waits in self._waits for wait in waits.values())

    def _is_stuck(self, start: int, wait: _Wait) -> bool:
        """Whether ``start`` waits for itself through others, or for a rank that has returned.

        A rank needs all ranks that it waits for, so any cycle is a deadlock.
        """
        if not self._finished.isdisjoint(wait.pending.absent):
            return True
        seen: set[int] = set()
        stack = [start]
        while stack:
            rank = stack.pop()
            if len(self._threads[rank]) > 1:
                continue  # another of its threads may proceed
            for other in self._waits[rank].values():
                if other.pending.complete or other.has_own_timeout:
                    continue
                absent = other.pending.absent
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
        """Add what the ranks at the root of the waits do to ``error``; needs the lock."""
        waits = {rank: self._waited_for(rank) for rank in range(self.size)}
        roots = {held_up_by(rank, waits, reporter=reporter) for rank in error.missing}
        known_stacks = {rank: sighting.stack() for rank, sighting in enumerate(self.sightings)}
        return explained(
            error,
            [self.sightings[rank].finding(rank) for rank in sorted(roots)],
            {rank: stack for rank, stack in known_stacks.items() if stack},
        )

    def _waited_for(self, rank: int) -> int | None:
        """The rank that ``rank`` waits for, or waited for until it timed out; None if none."""
        pending = next((wait.pending for wait in self._waits[rank].values()), None)
        pending = pending or self._gave_up.get(rank)
        return None if pending is None else min(pending.absent, default=None)

    def _others(self, reporter: int) -> str:
        """The waits of other ranks, for the message of a timeout of ``reporter``."""
        waits = (wait for wait in self._all_waits() if wait.call.rank != reporter)
        return "\n".join(f"  rank {wait.call.rank} waits in {wait.call}" for wait in waits)
