"""Simulated ranks: one thread each, tensors passed by reference.

The last rank that comes to a communication does the work for all, then wakes those who wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm.allocation import require, zeros
from echelon.comm.group import Group
from echelon.comm.reduce_op import reduce_into
from echelon.comm.threads.thread_world import (
    Pending,
    PendingCollective,
    PendingMessage,
    ThreadWorld,
)
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CallSite, CollectiveCall
from echelon.errors import CollectiveMismatch


@final
class _ThreadWork(Work):
    def __init__(self, call: CollectiveCall, fabric: ThreadWorld, pending: Pending) -> None:
        super().__init__(call)
        self._fabric = fabric
        self._pending = pending

    def done(self) -> bool:
        return self._pending.complete or self._fabric.failure is not None

    def _wait(self, timeout: float | None) -> None:
        self._fabric.wait(self._pending, self.call, timeout)


@final
class ThreadGroup(Group):
    """Simulated ranks of one process. Its windows are ordinary tensors that all ranks can see."""

    def __init__(
        self,
        fabric: ThreadWorld,
        rank: int,
        ranks: Sequence[int],
        *,
        name: str = "world",
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            name,
            rank,
            ranks,
            device or torch.device("cpu"),
            fabric.timeout,
            shares_memory=True,
            note=fabric.note,
        )
        self._fabric = fabric

    def _meet(
        self, call: CollectiveCall, item: Any, act: Callable[[list[Any]], None]
    ) -> _ThreadWork:
        """Bring ``item``; the last rank that comes runs ``act`` on all items in rank order."""
        fabric = self._fabric
        with fabric.lock:
            fabric.admit(call)
            key = (self.name, call.position)
            meeting = fabric.meetings.get(key)
            if meeting is None:
                meeting = fabric.meetings[key] = PendingCollective(self.ranks)
            meeting.calls[self.rank] = call
            meeting.brought[self.rank] = item
            meeting.absent.discard(call.rank)
            if meeting.absent:
                return _ThreadWork(call, fabric, meeting)
            del fabric.meetings[key]
        try:
            self._agree(meeting)
            with torch.inference_mode():  # or tensors of a rank in that mode could not be written
                act([meeting.brought[rank] for rank in range(self.size)])
        except Exception as error:  # raised on every rank that waits
            meeting.error = error
        fabric.complete(meeting)
        meeting.brought.clear()
        return _ThreadWork(call, fabric, meeting)

    def _agree(self, meeting: PendingCollective) -> None:
        calls = meeting.calls
        if any(call.signature != calls[0].signature for call in calls.values()):
            texts = {rank: f"{call.signature} at {call.place}" for rank, call in calls.items()}
            raise CollectiveMismatch(self.name, calls[0].position, texts)

    def _all_reduce(self, call: CollectiveCall, tensor: Tensor, op: str) -> Work:
        return self._meet(call, tensor, lambda tensors: reduce_into(tensors, tensors, op))

    def _reduce_scatter(
        self, call: CollectiveCall, output: Tensor, input: Tensor, splits: Sequence[int], op: str
    ) -> Work:
        def act(items: list[tuple[Tensor, Tensor]]) -> None:
            by_rank = [item[1].split(list(splits)) for item in items]
            for rank in range(self.size):
                if splits[rank]:
                    reduce_into([items[rank][0]], [parts[rank] for parts in by_rank], op)

        return self._meet(call, (output, input), _unaliased(act))

    def _all_gather(self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor) -> Work:
        def act(items: list[tuple[Sequence[Tensor], Tensor]]) -> None:
            for outs, _ in items:
                for out, (_, part) in zip(outs, items, strict=True):
                    out.copy_(part)

        return self._meet(call, (outputs, input), act)

    def _broadcast(self, call: CollectiveCall, tensor: Tensor, src: int) -> Work:
        def act(tensors: list[Tensor]) -> None:
            for rank, target in enumerate(tensors):
                if rank != src:
                    target.copy_(tensors[src])

        return self._meet(call, tensor, act)

    def _reduce(self, call: CollectiveCall, tensor: Tensor, dst: int, op: str) -> Work:
        def act(tensors: list[Tensor]) -> None:
            total = torch.empty_like(tensors[dst])
            reduce_into([total], tensors, op)
            tensors[dst].copy_(total)

        return self._meet(call, tensor, act)

    def _gather(
        self, call: CollectiveCall, outputs: Sequence[Tensor], tensor: Tensor, dst: int
    ) -> Work:
        def act(items: list[tuple[Sequence[Tensor], Tensor]]) -> None:
            for out, (_, part) in zip(items[dst][0], items, strict=True):
                out.copy_(part)

        return self._meet(call, (outputs, tensor), act)

    def _scatter(
        self, call: CollectiveCall, tensor: Tensor, inputs: Sequence[Tensor], src: int
    ) -> Work:
        def act(items: list[tuple[Tensor, Sequence[Tensor]]]) -> None:
            for (target, _), part in zip(items, items[src][1], strict=True):
                target.copy_(part)

        return self._meet(call, (tensor, inputs), act)

    def _all_to_all(
        self, call: CollectiveCall, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Work:
        def act(items: list[tuple[Sequence[Tensor], Sequence[Tensor], CallSite]]) -> None:
            sent = [[part.numel() for part in item[1]] for item in items]
            expected = [[part.numel() for part in item[0]] for item in items]
            if any(
                sent[s][r] != expected[r][s] for r in range(self.size) for s in range(self.size)
            ):
                texts = {
                    rank: f"sends {sent[rank]}, expects {expected[rank]} elements at {place}"
                    for rank, (_, _, place) in enumerate(items)
                }
                raise CollectiveMismatch.of_parts(self.name, call.position, texts)
            for rank, (outs, _, _) in enumerate(items):
                for out, (_, parts, _) in zip(outs, items, strict=True):
                    out.copy_(parts[rank])

        return self._meet(call, (outputs, inputs, call.place), act)

    def _barrier(self, call: CollectiveCall) -> Work:
        return self._meet(call, None, lambda items: None)

    def _send(self, call: CollectiveCall, tensor: Tensor, dst: int, tag: int) -> Work:
        return self._mail(call, tensor, self.rank, dst, tag)

    def _recv(self, call: CollectiveCall, tensor: Tensor, src: int, tag: int) -> Work:
        return self._mail(call, tensor, src, self.rank, tag)

    def _mail(self, call: CollectiveCall, tensor: Tensor, src: int, dst: int, tag: int) -> Work:
        fabric, op = self._fabric, call.signature.op
        with fabric.lock:
            fabric.admit(call)
            queue = fabric.mail.setdefault((self.name, src, dst, tag), deque())
            if not queue or op in queue[0].sides:  # the other side has not come yet
                transfer = PendingMessage((self.ranks[src], self.ranks[dst]))
                queue.append(transfer)
            else:
                transfer = queue.popleft()
            transfer.sides[op] = (self.rank, call, tensor)
            transfer.absent.discard(call.rank)
        if not transfer.absent:
            self._deliver(transfer)
            fabric.complete(transfer)
        return _ThreadWork(call, fabric, transfer)

    def _deliver(self, transfer: PendingMessage) -> None:
        (_, _, source), (_, _, target) = transfer.sides["send"], transfer.sides["recv"]
        if source.dtype != target.dtype or source.numel() != target.numel():
            texts = {
                rank: f"{call.signature} at {call.place}"
                for rank, call, _ in transfer.sides.values()
            }
            transfer.error = CollectiveMismatch.of_message(self.name, texts)
        else:
            with torch.inference_mode():
                target.copy_(source)

    def _subgroup(self, call: CollectiveCall, name: str, members: Sequence[int]) -> Group | None:
        self._barrier(call).wait()
        if self.rank not in members:
            return None
        return ThreadGroup(
            self._fabric,
            members.index(self.rank),
            [self.ranks[member] for member in members],
            name=name,
            device=self.device,
        )

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        regions: list[Tensor] = []
        local = zeros(numel, dtype, self.device, what=f"a window of {numel} elements on a rank")

        def act(items: list[tuple[list[Tensor], Tensor]]) -> None:
            for seen, _ in items:
                seen.extend(region for _, region in items)

        self._meet(call, (regions, local), act).wait()
        return Window(local, tuple(regions), shared=True)

    def _shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        seen: list[Tensor] = []
        what = f"a shared tensor of {numel} elements"
        require(numel * dtype.itemsize, self.device, what=what)

        def act(items: list[list[Tensor]]) -> None:
            one = zeros(numel, dtype, self.device, what=what)
            for item in items:
                item.append(one)

        self._meet(call, seen, act).wait()
        return seen[0].view(numel)  # a tensor of this rank's own on the same memory


def _unaliased(act: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    """Let an output lie inside its input, which others still read when it is written."""

    def safely(items: list[tuple[Tensor, Tensor]]) -> None:
        act([(out, part.clone() if _overlap(out, part) else part) for out, part in items])

    return safely


def _overlap(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
