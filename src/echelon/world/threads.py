"""Simulated ranks: one thread each, tensors passed by reference, a deadlock seen when it happens.

Every communication is a ``_Pending`` thing that some ranks still have to come to. The last one that
comes does the work for all, then wakes those who wait. Because the world knows who waits for whom,
a cycle of waiting ranks, or a wait for a rank that has returned, is found at once and not by a
timeout.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from echelon.errors import CollectiveMismatch, CommTimeout, DeadlockError, EchelonError, RankFailed
from echelon.world.arithmetic import reduce_into
from echelon.world.group import Group
from echelon.world.work import Ticket, Window, Work

__all__ = ["Fabric", "ThreadGroup"]


class _Pending:
    """Something that is complete when all its ranks have come."""

    def __init__(self, expected: Sequence[int]) -> None:
        self.absent = set(expected)  # ranks in the job that have not come
        self.complete = False
        self.error: EchelonError | None = None


class _Meeting(_Pending):
    """One collective: what each rank brought."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.ranks)
        self.tickets: dict[int, Ticket] = {}
        self.brought: dict[int, Any] = {}


class _Transfer(_Pending):
    """One message: a send and a receive that found, or wait for, each other."""

    def __init__(self, expected: Sequence[int]) -> None:
        super().__init__(expected)
        self.sides: dict[
            str, tuple[int, Ticket, Tensor]
        ] = {}  # by op: rank in group, ticket, tensor


@final
class Fabric:
    """What the simulated ranks of one job share: who waits, who returned, who failed.

    Args:
        size: number of ranks in the job.
        timeout: seconds that a rank waits for others by default.
    """

    def __init__(self, size: int, timeout: float) -> None:
        self.size = size
        self.timeout = timeout
        self.lock = threading.Lock()
        self.meetings: dict[tuple[str, int], _Meeting] = {}
        self.mail: dict[tuple[str, int, int, int], deque[_Transfer]] = {}
        self.failure: tuple[int, BaseException] | None = None
        self._wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self._waiting: dict[int, tuple[_Pending, Ticket]] = {}
        self._finished: set[int] = set()

    def finish(self, rank: int) -> None:
        """Note that a rank has returned; whoever waits for it never gets an answer."""
        with self.lock:
            self._finished.add(rank)
            if any(rank in pending.absent for pending, _ in self._waiting.values()):
                self._declare_deadlock(rank)

    def fail(self, rank: int, error: BaseException) -> None:
        """Note the first failure and wake all ranks, so that they end too."""
        with self.lock:
            self._fail(rank, error)

    def complete(self, pending: _Pending) -> None:
        """Wake the ranks that wait for ``pending``."""
        with self.lock:
            pending.complete = True
            for rank, (waited_for, _) in list(self._waiting.items()):
                if waited_for is pending:
                    del self._waiting[rank]
                    self._wakeups[rank].notify_all()

    def wait(self, pending: _Pending, ticket: Ticket, timeout: float | None) -> None:
        """Block the calling rank until ``pending`` is complete.

        Raises:
            CollectiveMismatch: the ranks that came do not agree.
            RankFailed: another rank failed.
            DeadlockError: no rank that is waited for can come.
            CommTimeout: time is up.
        """
        seconds = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + seconds
        with self.lock:
            while not pending.complete:
                self._raise_failure(ticket)
                self._waiting[ticket.rank] = (pending, ticket)
                if self._is_stuck(ticket.rank):
                    self._declare_deadlock(ticket.rank)
                    continue
                if not self._wakeups[ticket.rank].wait(deadline - time.monotonic()):
                    self._waiting.pop(ticket.rank, None)
                    if not pending.complete:
                        raise CommTimeout(
                            str(ticket), sorted(pending.absent), seconds, self._others()
                        )
        if pending.error is not None:
            raise copy.copy(pending.error)  # each rank gets its own traceback

    def _raise_failure(self, ticket: Ticket) -> None:
        if self.failure is None:
            return
        self._waiting.pop(ticket.rank, None)
        rank, error = self.failure
        if isinstance(error, DeadlockError):
            raise copy.copy(error)
        raise RankFailed(rank, f"raised {type(error).__name__}: {error}", str(ticket)) from error

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = (rank, error)
        for wakeup in self._wakeups:
            wakeup.notify_all()

    def _is_stuck(self, start: int) -> bool:
        """Whether ``start`` waits for itself through others, or for a rank that has returned.

        A rank needs everyone it waits for, so one cycle is enough for a deadlock.
        """
        seen: set[int] = set()
        stack = [start]
        while stack:
            waiter = self._waiting.get(stack.pop())
            if waiter is None or waiter[0].complete:
                continue
            for rank in waiter[0].absent:
                if rank == start or rank in self._finished:
                    return True
                if rank not in seen:
                    seen.add(rank)
                    stack.append(rank)
        return False

    def _declare_deadlock(self, rank: int) -> None:
        waits = {
            waiter: (str(ticket), sorted(pending.absent))
            for waiter, (pending, ticket) in self._waiting.items()
        }
        self._fail(rank, DeadlockError(waits, self._finished))

    def _others(self) -> str:
        """What the other ranks do, for the message of a timeout."""
        rows = [
            f"  rank {rank} waits in {ticket}"
            for rank, (_, ticket) in sorted(self._waiting.items())
        ]
        busy = sorted(set(range(self.size)) - set(self._waiting) - self._finished)
        rows += [
            f"  rank {rank} is busy outside communication, or is the one that reports this"
            for rank in busy
        ]
        return "\n".join(rows)


@final
class _ThreadWork(Work):
    def __init__(self, ticket: Ticket, fabric: Fabric, pending: _Pending) -> None:
        super().__init__(ticket)
        self._fabric = fabric
        self._pending = pending

    def done(self) -> bool:
        return self._pending.complete or self._fabric.failure is not None

    def _wait(self, timeout: float | None) -> None:
        self._fabric.wait(self._pending, self.ticket, timeout)


@final
class ThreadGroup(Group):
    """Simulated ranks of one process. Its windows are ordinary tensors that all ranks can see."""

    def __init__(
        self,
        fabric: Fabric,
        rank: int,
        ranks: Sequence[int],
        *,
        name: str = "world",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            name, rank, ranks, device or torch.device("cpu"), fabric.timeout, shares_memory=True
        )
        self._fabric = fabric

    def _meet(self, ticket: Ticket, item: Any, act: Callable[[list[Any]], None]) -> _ThreadWork:
        """Bring ``item``; the last rank that comes runs ``act`` on all items in rank order."""
        fabric = self._fabric
        with fabric.lock:
            fabric._raise_failure(ticket)
            key = (self.name, ticket.position)
            meeting = fabric.meetings.get(key)
            if meeting is None:
                meeting = fabric.meetings[key] = _Meeting(self)
            meeting.tickets[self.rank] = ticket
            meeting.brought[self.rank] = item
            meeting.absent.discard(ticket.rank)
            if meeting.absent:
                return _ThreadWork(ticket, fabric, meeting)
            del fabric.meetings[key]
        try:
            self._agree(meeting)
            act([meeting.brought[rank] for rank in range(self.size)])
        except EchelonError as error:
            meeting.error = error
        fabric.complete(meeting)
        meeting.brought.clear()
        return _ThreadWork(ticket, fabric, meeting)

    def _agree(self, meeting: _Meeting) -> None:
        tickets = meeting.tickets
        if any(ticket.call != tickets[0].call for ticket in tickets.values()):
            calls = {rank: f"{ticket.call} at {ticket.place}" for rank, ticket in tickets.items()}
            raise CollectiveMismatch(self.name, tickets[0].position, calls)

    def _all_reduce(self, ticket: Ticket, tensor: Tensor, op: str) -> Work:
        return self._meet(ticket, tensor, lambda tensors: reduce_into(tensors, tensors, op))

    def _reduce_scatter(self, ticket: Ticket, output: Tensor, input: Tensor, op: str) -> Work:
        def act(items: list[tuple[Tensor, Tensor]]) -> None:
            numel = items[0][0].numel()
            for rank in range(self.size):
                parts = [item[1].narrow(0, rank * numel, numel) for item in items]
                reduce_into([items[rank][0]], parts, op)

        return self._meet(ticket, (output, input), _unaliased(act))

    def _all_gather(self, ticket: Ticket, outputs: Sequence[Tensor], input: Tensor) -> Work:
        def act(items: list[tuple[Sequence[Tensor], Tensor]]) -> None:
            for outs, _ in items:
                for out, (_, part) in zip(outs, items, strict=True):
                    out.copy_(part)

        return self._meet(ticket, (outputs, input), act)

    def _broadcast(self, ticket: Ticket, tensor: Tensor, src: int) -> Work:
        def act(tensors: list[Tensor]) -> None:
            for rank, target in enumerate(tensors):
                if rank != src:
                    target.copy_(tensors[src])

        return self._meet(ticket, tensor, act)

    def _reduce(self, ticket: Ticket, tensor: Tensor, dst: int, op: str) -> Work:
        def act(tensors: list[Tensor]) -> None:
            total = torch.empty_like(tensors[dst])
            reduce_into([total], tensors, op)
            tensors[dst].copy_(total)

        return self._meet(ticket, tensor, act)

    def _gather(self, ticket: Ticket, outputs: Sequence[Tensor], tensor: Tensor, dst: int) -> Work:
        def act(items: list[tuple[Sequence[Tensor], Tensor]]) -> None:
            for out, (_, part) in zip(items[dst][0], items, strict=True):
                out.copy_(part)

        return self._meet(ticket, (outputs, tensor), act)

    def _scatter(self, ticket: Ticket, tensor: Tensor, inputs: Sequence[Tensor], src: int) -> Work:
        def act(items: list[tuple[Tensor, Sequence[Tensor]]]) -> None:
            for (target, _), part in zip(items, items[src][1], strict=True):
                target.copy_(part)

        return self._meet(ticket, (tensor, inputs), act)

    def _all_to_all(
        self, ticket: Ticket, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Work:
        def act(items: list[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> None:
            sent = [[part.numel() for part in item[1]] for item in items]
            expected = [[part.numel() for part in item[0]] for item in items]
            if any(
                sent[s][r] != expected[r][s] for r in range(self.size) for s in range(self.size)
            ):
                texts = {
                    rank: f"all_to_all_single sends {sent[rank]}, expects {expected[rank]} elements"
                    for rank in range(self.size)
                }
                raise CollectiveMismatch(self.name, ticket.position, texts)
            for rank, (outs, _) in enumerate(items):
                for out, (_, parts) in zip(outs, items, strict=True):
                    out.copy_(parts[rank])

        return self._meet(ticket, (outputs, inputs), act)

    def _barrier(self, ticket: Ticket) -> Work:
        return self._meet(ticket, None, lambda items: None)

    def _send(self, ticket: Ticket, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._mail(ticket, tensor, self.rank, dst, tag)

    def _recv(self, ticket: Ticket, tensor: Tensor, src: int, tag: int) -> Work:
        return self._mail(ticket, tensor, src, self.rank, tag)

    def _mail(self, ticket: Ticket, tensor: Tensor, src: int, dst: int, tag: int) -> Work:
        fabric, op = self._fabric, ticket.call.op
        with fabric.lock:
            fabric._raise_failure(ticket)
            queue = fabric.mail.setdefault((self.name, src, dst, tag), deque())
            if not queue or op in queue[0].sides:  # the other side has not come yet
                transfer = _Transfer((self.ranks[src], self.ranks[dst]))
                queue.append(transfer)
            else:
                transfer = queue.popleft()
            transfer.sides[op] = (self.rank, ticket, tensor)
            transfer.absent.discard(ticket.rank)
        if not transfer.absent:
            self._deliver(transfer)
            fabric.complete(transfer)
        return _ThreadWork(ticket, fabric, transfer)

    def _deliver(self, transfer: _Transfer) -> None:
        (_, sent, source), (_, received, target) = transfer.sides["send"], transfer.sides["recv"]
        if source.dtype != target.dtype or source.numel() != target.numel():
            texts = {
                rank: f"{ticket.call} at {ticket.place}"
                for rank, ticket, _ in transfer.sides.values()
            }
            transfer.error = CollectiveMismatch(
                self.name, min(sent.position, received.position), texts
            )
        else:
            target.copy_(source)

    def _subgroup(self, ticket: Ticket, name: str, members: Sequence[int]) -> Group | None:
        self._barrier(ticket).wait()
        if self.rank not in members:
            return None
        return ThreadGroup(
            self._fabric,
            members.index(self.rank),
            [self.ranks[member] for member in members],
            name=name,
            device=self.device,
        )

    def _window(self, ticket: Ticket, numel: int, dtype: torch.dtype) -> Window:
        regions: list[Tensor] = []
        local = torch.zeros(numel, dtype=dtype, device=self.device)

        def act(items: list[tuple[list[Tensor], Tensor]]) -> None:
            for seen, _ in items:
                seen.extend(region for _, region in items)

        self._meet(ticket, (regions, local), act).wait()
        return Window(local, tuple(regions), shared=True)


def _unaliased(act: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """Let an output lie inside its input, which others still read when it is written."""

    def safely(items: list[tuple[Tensor, Tensor]]) -> None:
        act([(out, part.clone() if _overlap(out, part) else part) for out, part in items])

    return safely


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
