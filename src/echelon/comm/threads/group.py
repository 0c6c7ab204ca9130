"""The group of simulated ranks, which are threads that pass tensors by reference.

The last rank that joins a communication does the work of all ranks, and wakes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from echelon.comm.buffers import require_memory, zeros
from echelon.comm.derived import Barrier, Reduce
from echelon.comm.group import Group
from echelon.comm.primitives import (
    AllGather,
    AllReduce,
    Broadcast,
    Derived,
    Exchange,
    Primitive,
    Receive,
    ReduceScatter,
    Send,
)
from echelon.comm.reduce_op import reduce_into
from echelon.comm.threads.thread_world import (
    MessageSide,
    Pending,
    PendingCollective,
    PendingMessage,
    ThreadWorld,
)
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CollectiveMismatch

T = TypeVar("T")
Calls: TypeAlias = list[CollectiveCall]
# Does the work of all ranks, with their items and calls in rank order.
Act: TypeAlias = Callable[[list[T], Calls], None]


@final
class _ThreadWork(Work):
    def __init__(self, call: CollectiveCall, world: ThreadWorld, pending: Pending) -> None:
        super().__init__(call)
        self._world = world
        self._pending = pending

    def done(self) -> bool:
        return self._pending.complete or self._world.failure is not None

    def _wait(self, timeout: float | None) -> None:
        self._world.wait(self._pending, self.call, timeout)


@final
class ThreadGroup(Group):
    """Simulated ranks of one process, whose windows are ordinary tensors."""

    overrides = frozenset({Barrier, Reduce})  # their primitives would make views of parts

    def __init__(
        self,
        world: ThreadWorld,
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
            world.timeout,
            shares_memory=True,
            note=world.note,
        )
        self._world = world

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work:
        act = _ACTS.get(type(operation))
        if act is not None:
            return self._meet(call, operation, act)
        if type(operation) is Send:
            return self._mail(call, operation.tensor, self.rank, operation.dst, operation.tag)
        assert type(operation) is Receive
        return self._mail(call, operation.tensor, operation.src, self.rank, operation.tag)

    def _meet(self, call: CollectiveCall, item: T, act: Act[T]) -> _ThreadWork:
        """Join a collective with ``item``; the last rank runs ``act`` on the items of all."""
        world = self._world
        with world.lock:
            world.admit(call)
            key = (self.name, call.position)
            meeting = world.meetings.get(key)
            if meeting is None:
                meeting = world.meetings[key] = PendingCollective(self.ranks, call, item)
            meeting.calls[self.rank] = call
            meeting.items[self.rank] = item
            meeting.absent.discard(call.rank)
            if meeting.absent:
                return _ThreadWork(call, world, meeting)
            del world.meetings[key]
        try:
            self._agree(meeting.calls)
            with torch.inference_mode():  # inference tensors of ranks can be written only in it
                act(meeting.items, meeting.calls)
        except Exception as error:  # raised on every rank that waits
            meeting.error = error
        world.complete(meeting)
        meeting.items.clear()
        return _ThreadWork(call, world, meeting)

    def _agree(self, calls: Sequence[CollectiveCall]) -> None:
        first = calls[0]
        for call in calls:
            if call.signature != first.signature:
                texts = {rank: f"{c.signature} at {c.place}" for rank, c in enumerate(calls)}
                raise CollectiveMismatch(self.name, first.position, texts)

    def _mail(self, call: CollectiveCall, tensor: Tensor, src: int, dst: int, tag: int) -> Work:
        world, op = self._world, call.signature.op
        with world.lock:
            world.admit(call)
            queue = world.mail.setdefault((self.name, src, dst, tag), deque())
            if not queue or op in queue[0].sides:  # the other side has not joined yet
                transfer = PendingMessage((self.ranks[src], self.ranks[dst]))
                queue.append(transfer)
            else:
                transfer = queue.popleft()
            transfer.sides[op] = MessageSide(self.rank, call, tensor)
            transfer.absent.discard(call.rank)
        if not transfer.absent:
            self._deliver(transfer)
            world.complete(transfer)
        return _ThreadWork(call, world, transfer)

    def _deliver(self, transfer: PendingMessage) -> None:
        source, target = transfer.sides["send"].tensor, transfer.sides["recv"].tensor
        if source.dtype != target.dtype or source.numel() != target.numel():
            texts = {
                side.rank: f"{side.call.signature} at {side.call.place}"
                for side in transfer.sides.values()
            }
            transfer.error = CollectiveMismatch.of_message(self.name, texts)
        else:
            with torch.inference_mode():
                target.copy_(source)

    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int]
    ) -> ThreadGroup | None:
        self._meet(call, None, _nothing).wait()
        if self.rank not in members:
            return None
        return ThreadGroup(
            self._world,
            members.index(self.rank),
            [self.ranks[member] for member in members],
            name=name,
            device=self.device,
        )

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        regions: list[Tensor] = []
        local = zeros(numel, dtype, self.device, what=f"a window of {numel} elements on a rank")

        def act(items: list[tuple[list[Tensor], Tensor]], calls: Calls) -> None:
            for regions_of_rank, _ in items:
                regions_of_rank.extend(region for _, region in items)

        self._meet(call, (regions, local), act).wait()
        return Window(local, tuple(regions), shared=True)

    def _shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        tensors: list[Tensor] = []
        what = f"a shared tensor of {numel} elements"
        require_memory(numel * dtype.itemsize, self.device, what=what)

        def act(items: list[list[Tensor]], calls: Calls) -> None:
            shared = zeros(numel, dtype, self.device, what=what)
            for item in items:
                item.append(shared)

        self._meet(call, tensors, act).wait()
        return tensors[0].view(numel)  # each rank has a tensor of its own on the same memory


def _all_reduce(operations: list[AllReduce], calls: Calls) -> None:
    tensors = [operation.tensor for operation in operations]
    reduce_into(tensors, tensors, operations[0].op)


def _reduce_scatter(operations: list[ReduceScatter], calls: Calls) -> None:
    splits, op = operations[0].splits, operations[0].op
    targets = [operation.target(rank) for rank, operation in enumerate(operations)]
    parts = [operation.input.split(splits) for operation in operations]
    for rank, target in enumerate(targets):
        if splits[rank]:
            reduce_into([target], [of_rank[rank] for of_rank in parts], op)
    for target, operation in zip(targets, operations, strict=True):
        if target is not operation.output:
            operation.output.copy_(target)


def _all_gather(operations: list[AllGather], calls: Calls) -> None:
    for receiver in operations:
        for output, sender in zip(receiver.outputs, operations, strict=True):
            output.copy_(sender.input)


def _broadcast(operations: list[Broadcast], calls: Calls) -> None:
    src = operations[0].src
    for rank, operation in enumerate(operations):
        if rank != src:
            operation.tensor.copy_(operations[src].tensor)


def _reduce(operations: list[Reduce], calls: Calls) -> None:
    dst, op = operations[0].dst, operations[0].op
    reduce_into([operations[dst].tensor], [operation.tensor for operation in operations], op)


def _exchange(operations: list[Exchange], calls: Calls) -> None:
    if not operations[0].lengths_agreed:
        _check_lengths(operations, calls)
    for receiver, operation in enumerate(operations):
        for output, sender in zip(operation.outputs, operations, strict=True):
            if output.numel():
                output.copy_(sender.inputs[receiver])


def _check_lengths(operations: list[Exchange], calls: Calls) -> None:
    ranks = range(len(operations))
    sent = [[part.numel() for part in operation.inputs] for operation in operations]
    expected = [[part.numel() for part in operation.outputs] for operation in operations]
    if any(sent[s][r] != expected[r][s] for r in ranks for s in ranks):
        texts = {
            rank: f"sends {sent[rank]}, expects {expected[rank]} elements at {calls[rank].place}"
            for rank in ranks
        }
        raise CollectiveMismatch.of_parts(calls[0].group, calls[0].position, texts)


def _nothing(operations: list[Any], calls: Calls) -> None:
    """All ranks have joined, which is all that a barrier does."""


_ACTS: dict[type[Primitive | Derived], Act[Any]] = {
    AllReduce: _all_reduce,
    ReduceScatter: _reduce_scatter,
    AllGather: _all_gather,
    Broadcast: _broadcast,
    Exchange: _exchange,
    Barrier: _nothing,
    Reduce: _reduce,
}
