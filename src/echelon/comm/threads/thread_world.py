"""The state that the simulated ranks of one process share: waits, returns and failures.

Every communication is ``Pending`` until all its ranks have joined it. The world knows which rank
waits for which others, so it detects a cycle of waiting ranks, or a wait for a rank that has
returned, at once and not by a timeout. A rank that communicates from several threads is stuck when
none of them can go on, and not before (``worker_threads``); one that waits with a timeout of its
own never is.
"""

from __future__ import annotations

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

from echelon.comm.threads.call_watch import CallWatch
from echelon.comm.threads.kept_by_threads import started_by
from echelon.comm.threads.last_seen import LastSeen
from echelon.comm.threads.pending import (
    Pending,
    PendingCollective,
    PendingCondition,
    PendingMessage,
    RankWait,
)
from echelon.comm.threads.rank_rules import RankRules
from echelon.comm.threads.running_time import running_s
from echelon.comm.threads.turns import Turns
from echelon.comm.threads.worker_threads import LOOK_S, WorkerThreads
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.diagnosis.failure_record import cause_of, is_heard
from echelon.diagnosis.rank_monitor import StepCounter
from echelon.diagnosis.root_cause import end_of_wait_chain
from echelon.diagnosis.step_rows import StepRows
from echelon.diagnosis.stuck_ranks import ExitSign, ExitStage, error_of, explained
from echelon.errors import (
    CollectiveMismatch,
    CommError,
    CommTimeout,
    DeadlockError,
    RankFailed,
    StateError,
)
from echelon.errors.message_text import ranks_text


@final
class ThreadWorld:
    """The shared state of the simulated ranks of one job.

    Args:
        size: the number of ranks.
        timeout: the seconds that a rank waits for others by default.
        rules: how operations of ranks match and wait; None: messages match by their tags.

    Attributes:
        order: when each rank runs.
        tells_last_calls: a deadlock names the last call of ranks that have returned.
        watch: looks at the calls of all ranks.
        aborted: by the name of a group, the rank that has aborted it, and why.
    """

    def __init__(self, size: int, timeout: float, rules: RankRules | None = None) -> None:
        self.order = order = Turns(size)
        self.rules = RankRules() if rules is None else rules
        self.size = size
        self.timeout = timeout
        self.sightings = [LastSeen() for _ in range(size)]
        self.lock = order.lock
        self.meetings: dict[tuple[str, int], PendingCollective] = {}
        self.mail: dict[tuple[str, int, int, int], deque[PendingMessage]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self._waits: list[dict[int, RankWait]] = [{} for _ in range(size)]  # by rank, by thread
        self._num_events = 0  # calls and completions of all ranks
        self._polls: dict[int, tuple[int, float]] = {}  # by rank: the events then, and since when
        self._gave_up: dict[int, Pending] = {}  # by rank whose last call timed out
        self._threads = [WorkerThreads(partial(started_by, order, rank)) for rank in range(size)]
        self._with_workers: set[int] = set()  # ranks that communicate from several threads
        self._finished: set[int] = set()
        self._step_rows: dict[int, StepRows] = {}  # by rank
        self._conditions: list[PendingCondition] = []  # that ranks wait for
        self._mismatch: tuple[int, CollectiveMismatch] | None = None  # see ``note_mismatch``
        self.tells_last_calls = False
        self.watch = CallWatch()
        self.aborted: dict[str, tuple[int, str]] = {}

    def enter(self, rank: int) -> None:
        """Record that a rank runs on the calling thread."""
        self._threads[rank].note()
        sighting = self.sightings[rank]
        sighting.thread, sighting.native_id = threading.get_ident(), threading.get_native_id()

    def step_counter(self, rank: int) -> StepCounter:
        """Counts the steps of a rank, and measures them by the clock of the rank."""
        counter = StepCounter(
            self.sightings[rank].note_step,
            clock=partial(self.order.clocks.read, rank),
            takes_turns=True,
        )
        peers = self._step_rows
        peers[rank] = counter.time.rows
        peers[rank].peers = lambda: peers
        return counter

    def note(self, call: CollectiveCall) -> None:
        """Record the last call of a rank."""
        self.sightings[call.rank].call = call
        self._num_events += 1
        if self._gave_up:
            self._gave_up.pop(call.rank, None)

    def note_mismatch(self, rank: int, error: CollectiveMismatch) -> None:
        """Keep an error that a device does not raise: a program that catches it hangs there."""
        if self._mismatch is None:
            self._mismatch = rank, error

    def finish(self, rank: int) -> None:
        """Record that a rank has returned, or has closed its world."""
        with self.lock:
            self._finished.add(rank)
            waits = list(self._all_waits())
            if any(self._needs(wait, rank) for wait in waits) or (
                (self._conditions or self.rules.has_queues)
                and any(self._is_stuck(wait.call.rank, wait) for wait in waits)
            ):
                self._declare_deadlock(rank)
            elif len(self._finished) == self.size and self.failure is None:
                self._declare_left(rank)

    def exit_sign(self, rank: int, runs: bool) -> ExitSign:
        """The state of a rank now; ``runs`` says that its thread has not ended."""
        with self.lock:
            seen = self.sightings[rank]
            waits = bool(self._waits[rank]) or self.order.is_next(rank)
            stage = ExitStage.CLOSED if rank in self._finished else ExitStage.RUNNING
            call = None if seen.call is None else (seen.call.group, seen.call.position)
            return ExitSign(
                stage=stage if runs else ExitStage.ENDED,
                progress=(seen.step, call, waits),
                waits=waits,
            )

    def has_finished(self, rank: int) -> bool:
        """Whether a rank has returned, or has closed its world."""
        return rank in self._finished

    def waits_of(self, rank: int) -> list[tuple[CollectiveCall, list[int]]]:
        """The calls that a rank waits in, and for which ranks; needs the lock."""
        waits = self._waits[rank].values()
        return [(wait.call, sorted(wait.pending.absent)) for wait in waits]

    def stuck_rank_error(self, late: Sequence[int]) -> CommTimeout:
        """The error about ranks that still run long after others have left."""
        return error_of([self.sightings[rank].describe(rank) for rank in late], self.timeout)

    def long_turn_error(self, rank: int, others: Sequence[int], seconds: float) -> CommTimeout:
        """The error about a rank that has kept others from running for as long as they wait."""
        doing = f"the turn of {ranks_text(others)}"
        with self.lock:
            return self._explained(CommTimeout(doing, [rank], seconds), others[0])

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure, and wake all ranks so that they end, too."""
        with self.lock:
            self._fail(rank, error)

    def join(self, pending: Pending, call: CollectiveCall) -> None:
        """Record that a rank has joined ``pending``; needs the lock."""
        pending.absent.discard(call.rank)
        pending.came_ns = max(pending.came_ns, self.order.clocks.read(call.rank))

    def open_communicator(
        self,
        group: str,
        ranks: Sequence[int],
        pair: tuple[int, int] | None,
        call: CollectiveCall,
        limit_s: float,
    ) -> None:
        """Hold a rank before an operation until others have come, where the rules ask for that."""
        with self.lock:
            if group in self.aborted:
                return  # the operation says so
            pending = self.rules.communicator(group, ranks, pair, call.rank)
            if pending is None:
                return
            self.admit(call)
            self.join(pending, call)
        if not pending.absent:
            self.complete(pending)
        self.wait(pending, call, None, limit_s)

    @contextmanager
    def batch(self, rank: int) -> Iterator[None]:
        """The messages that a rank issues in the body are one operation."""
        with self.lock:
            self.rules.begin_batch(rank)
        try:
            yield
        finally:
            with self.lock:
                ready = self.rules.end_batch(rank)
            self.carry_out(ready)

    def carry_out(self, ready: Sequence[Pending]) -> None:
        """Do what operations were joined for, and then what has waited for them."""
        waiting = list(ready)
        for pending in waiting:  # which grows
            pending.carry_out(pending)
            waiting += self.complete(pending)

    def complete(self, pending: Pending) -> Sequence[Pending]:
        """Wake the ranks that wait for ``pending``; what can be carried out now."""
        with self.lock:
            pending.complete = True
            self._num_events += 1
            for rank in pending.expected:
                waits = self._waits[rank]
                threads = [t for t, wait in waits.items() if wait.pending is pending]
                for thread in threads:
                    del waits[thread]
                if threads:
                    self.order.wake(rank, threads)
            return self.rules.completed(pending)

    def is_complete(self, pending: Pending, call: CollectiveCall, limit_s: float) -> bool:
        """Whether a wait for ``pending`` would return, or raise, at once.

        A rank that asks for longer than it may wait, while no rank calls or completes anything,
        fails as if it had waited.
        """
        if not pending.complete and self.failure is None:
            self.order.yield_turn(call.rank, limit_s)  # others run while a rank polls in a loop
            if not pending.complete:
                self._note_poll(pending, call, limit_s)
        return pending.complete or self.failure is not None

    def _note_poll(self, pending: Pending, call: CollectiveCall, limit_s: float) -> None:
        rank, now_s = call.rank, running_s()
        num_events, since_s = self._polls.get(rank, (-1, now_s))
        if num_events != self._num_events:
            self._polls[rank] = (self._num_events, now_s)
        elif now_s - since_s > limit_s:
            with self.lock:
                error = CommTimeout(str(call), self._late(pending), limit_s, self._others(rank))
                self._fail(rank, self._explained(error, rank))

    def wait(
        self, pending: Pending, call: CollectiveCall, timeout: float | None, limit_s: float
    ) -> None:
        """Block the calling thread until ``pending`` is complete, or raise why it cannot be.

        Args:
            timeout: seconds that this call wants to wait; None: ``limit_s``, as all calls do.
        """
        rank = call.rank
        overtake = True  # take the turn in any case, because the world fails
        with self.lock:
            if self._threads[rank].note():
                self._with_workers.add(rank)
            try:
                if not pending.complete:
                    self._await(pending, call, timeout, limit_s)
                overtake = False
            except CommTimeout:
                overtake = timeout is None  # a caller with a timeout of its own may wait again
                raise
            finally:
                self.order.resume(rank, overtake=overtake)
            self.order.clocks.advance(rank, pending.came_ns)
        if pending.error is not None:
            raise copy.copy(pending.error)  # with a traceback of its own for each rank

    def wait_until(
        self,
        condition: PendingCondition,
        call: CollectiveCall,
        timeout: float | None,
        limit_s: float,
    ) -> None:
        """Block the calling thread until ``wake_conditions`` finds that a condition holds."""
        with self.lock:
            self.admit(call)
            self._conditions.append(condition)  # from now on, nobody's waking is lost
        try:
            if condition.ready():
                condition.complete = True  # and never False, because another may have set it
            self.wait(condition, call, timeout, limit_s)
        finally:
            with self.lock:
                self._conditions.remove(condition)

    def wake_conditions(self) -> None:
        """Wake the ranks whose condition holds now."""
        for condition in [each for each in self._conditions if not each.complete and each.ready()]:
            self.complete(condition)

    def _await(
        self, pending: Pending, call: CollectiveCall, timeout: float | None, limit_s: float
    ) -> None:
        """Sleep until ``pending`` is complete.

        Limits of time count the clock of the latest missing rank, so that a rank that only waits
        for its turn is not late.
        """
        order, rank, thread = self.order, call.rank, threading.get_ident()
        seconds = limit_s if timeout is None else timeout
        clocks = order.clocks
        start_ns, idle_ns = clocks.read(rank), clocks.idle_ns()
        left_s = seconds
        while not pending.complete:
            if self.failure is not None:
                self.raise_failure(call)
            wait = self._waits[rank][thread] = RankWait(pending, call, timeout is not None)
            if self._is_stuck(rank, wait):
                self._declare_deadlock(rank)
                continue
            if left_s > 0:
                has_workers = self._with_workers and self._has_workers()
                order.sleep(rank, min(left_s, LOOK_S) if has_workers else left_s, limit_s)
                if not pending.complete:
                    latest_ns = max(map(clocks.read, pending.absent), default=start_ns)
                    waited_ns = max(0, latest_ns - start_ns) + clocks.idle_ns() - idle_ns
                    left_s = seconds - 1e-9 * waited_ns
                continue
            del self._waits[rank][thread]
            self._gave_up[rank] = pending
            error = CommTimeout(str(call), self._late(pending), seconds, self._others(rank))
            raise self._explained(error, rank) if timeout is None else error

    def _late(self, pending: Pending) -> list[int]:
        """The missing ranks that have had a turn, or those whose queues hold it, or else all."""
        others_first = {rank for rank in pending.absent if self.order.is_next(rank)}
        late = pending.absent - others_first
        return sorted(late or self.rules.holders(pending) or pending.absent)

    def admit(self, call: CollectiveCall) -> None:
        """Refuse a call of a rank whose world has ended; needs the lock."""
        self.order.resume(call.rank)
        if call.rank in self._finished and self.failure is None:
            raise StateError(f"{call} was issued after its world was closed")
        if self.failure is not None:
            self.raise_failure(call)

    def raise_failure(self, call: CollectiveCall) -> None:
        """Raise if a rank has failed; needs the lock."""
        if self.failure is None:
            return
        self._waits[call.rank].pop(threading.get_ident(), None)
        rank, error = self.failure
        if isinstance(error, DeadlockError):
            raise copy.copy(error)
        raise RankFailed(rank, cause_of(error), str(call)) from error

    def _fail(self, rank: int, error: BaseException) -> None:
        is_report = self.failure is not None and is_heard(self.failure[1], self.failure[0])
        if self.failure is None or (is_report and not isinstance(error, CommError)):
            self.failure = (rank, error)  # rather than a rank that reports the failure of another
        for other, waits in enumerate(self._waits):
            self.order.wake(other, list(waits))
        self.order.hurry()

    def _all_waits(self) -> Iterator[RankWait]:
        return (wait for waits in self._waits for wait in waits.values())

    def _is_stuck(self, start: int, wait: RankWait) -> bool:
        """Whether ``start`` waits for itself through others, or for a rank that has returned.

        A rank needs all ranks that it waits for, so any cycle is a deadlock.
        """
        simple = not (
            self._conditions
            or self.rules.has_queues
            or (self._with_workers and self._has_workers())
        )
        if simple and not self._is_in_circle(start, wait):
            return False
        if simple:  # threads that ranks have started may come to their first calls
            ranks = range(self.size)
            self._with_workers |= {rank for rank in ranks if self._threads[rank].are_several()}
        going = self._ranks_that_may_go_on()
        return not self._may_end(wait, going, self.rules.able(going))

    def _is_in_circle(self, start: int, wait: RankWait) -> bool:
        """Whether ``start`` waits for itself or a rank that has returned, one wait in each rank."""
        if not self._finished.isdisjoint(wait.pending.absent):
            return True
        seen: set[int] = set()
        stack = [start]
        while stack:
            rank = stack.pop()
            for other in self._waits[rank].values():
                if other.pending.complete or other.has_own_timeout:
                    continue
                absent = other.pending.absent
                if start in absent or not self._finished.isdisjoint(absent):
                    return True
                stack.extend(absent - seen)
                seen |= absent
        return False

    def _needs(self, wait: RankWait, rank: int) -> bool:
        """Whether a wait can end only if the rank joins."""
        return (
            not wait.has_own_timeout
            and not isinstance(wait.pending, PendingCondition)
            and rank in wait.pending.absent
        )

    def _has_workers(self) -> bool:
        """Whether a rank has other threads that communicate, which may end or become idle."""
        ended = [rank for rank in self._with_workers if not self._threads[rank].are_several()]
        self._with_workers.difference_update(ended)
        return bool(self._with_workers)

    def _ranks_that_may_go_on(self) -> set[int]:
        """The ranks that run, or one of whose waits such ranks can end (see ``_may_end``)."""
        going = {
            rank
            for rank in range(self.size)
            if rank not in self._finished
            and (
                not self._waits[rank]
                or self.order.is_next(rank)
                or self._threads[rank].may_go_on(self._waits[rank])
            )
        }
        while True:
            able = self.rules.able(going)
            more = {
                rank
                for rank in range(self.size)
                if rank not in going
                and rank not in self._finished
                and any(self._may_end(wait, going, able) for wait in self._waits[rank].values())
            }
            if not more:
                return going
            going |= more

    def _may_end(self, wait: RankWait, going: set[int], able: Callable[[Pending], bool]) -> bool:
        """Whether a wait may end, if these ranks go on."""
        pending = wait.pending
        if pending.complete or wait.has_own_timeout:
            return True
        if isinstance(pending, PendingCondition):
            return not going.isdisjoint(pending.others)
        return able(pending)

    def _missing(self, wait: RankWait) -> list[int]:
        """The other ranks that a wait is for."""
        rank, pending = wait.call.rank, wait.pending
        late = [other for other in self._late(pending) if other != rank]
        return late or [other for other in pending.expected if other != rank]

    def _declare_deadlock(self, rank: int) -> None:
        """Fail with who waits for whom; ``rank`` has found it."""
        stuck = {wait.call.rank: wait for wait in self._all_waits()}
        waits = {r: (str(wait.call), self._missing(wait)) for r, wait in stuck.items()}
        reasons = {r: self.rules.reason(wait.pending) for r, wait in stuck.items()}
        calls = {other: self.sightings[other].call for other in self._finished}
        last_calls = {other: str(call) for other, call in calls.items() if call is not None}
        shown = last_calls if self.tells_last_calls else {}
        self._fail(rank, DeadlockError(waits, self._finished, shown, reasons))

    def _declare_left(self, rank: int) -> None:
        """Fail if an operation has begun that no rank has waited for, and that cannot end.

        So does a mismatch that the program has caught (``note_mismatch``).
        """
        if self._mismatch is not None:
            self._fail(*self._mismatch)
            return
        left = self.rules.left()
        for other, (pending, call) in left.items():
            self._waits[other][0] = RankWait(pending, call, False)
        if left:
            self._declare_deadlock(rank)

    def _explained(self, error: CommTimeout, reporter: int) -> CommTimeout:
        """Add what the ranks at the root of the waits do to ``error``; needs the lock."""
        waits = {rank: self._waited_for(rank) for rank in range(self.size)}
        roots = {end_of_wait_chain(rank, waits, reporter=reporter) for rank in error.missing}
        known_stacks = {rank: sighting.stack() for rank, sighting in enumerate(self.sightings)}
        findings = [self.sightings[rank].describe(rank) for rank in sorted(roots)]
        return explained(error, findings, {rank: s for rank, s in known_stacks.items() if s})

    def _waited_for(self, rank: int) -> int | None:
        """The rank that ``rank`` waits for, or waited for until it timed out; None if none."""
        pending = next((wait.pending for wait in self._waits[rank].values()), None)
        pending = pending or self._gave_up.get(rank)
        return None if pending is None else min(pending.absent, default=None)

    def _others(self, reporter: int) -> str:
        """The waits of other ranks, for the message of a timeout of ``reporter``."""
        waits = (wait for wait in self._all_waits() if wait.call.rank != reporter)
        return "\n".join(f"  rank {wait.call.rank} waits in {wait.call}" for wait in waits)
