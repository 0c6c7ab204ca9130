"""The group of simulated ranks, which are threads that pass tensors by reference.

The last rank that joins a communication does the work of all ranks, and wakes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
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
from echelon.comm.threads.pending import (
    MessageSide,
    Pending,
    PendingCollective,
    PendingCondition,
    PendingMessage,
)
from echelon.comm.threads.rank_rules import RankRules
from echelon.comm.threads.rank_threads import require_of_rank
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.comm.work import Window, Work
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall
from echelon.errors import CollectiveMismatch, RankFailed

T = TypeVar("T")
Calls: TypeAlias = list[CollectiveCall]
# Does the work of all ranks, with their items and calls in rank order.
Act: TypeAlias = Callable[[list[T], Calls], None]
_SETUP = RankRules()


@final
class _ThreadWork(Work):
    def __init__(
        self, call: CollectiveCall, world: ThreadWorld, pending: Pending, limit_s: float
    ) -> None:
        super().__init__(call)
        self._world, self._limit_s = world, limit_s
        self._pending = pending

    def done(self) -> bool:
        return self._world.is_complete(self._pending, self.call, self._limit_s)

    def _wait(self, timeout: float | None) -> None:
        order = self._world.order
        if order.asking_thread is not None and not self._pending.complete:
            order.require_running(self.call)
        self._world.wait(self._pending, self.call, timeout, self._limit_s)


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
        rules: RankRules | None = None,
    ) -> None:
        self._rules = world.rules if rules is None else rules
        super().__init__(
            name,
            rank,
            ranks,
            device or torch.device("cpu"),
            world.timeout,
            shares_memory=self._rules.shares_memory,
            note=self._note_call,
        )
        self._world = world
        self.has_tags = self._rules.has_tags

    def _note_call(self, call: CollectiveCall) -> None:
        order = self._world.order
        if order.asking_thread is not None:
            order.require_running(call)
        require_of_rank(order, call)
        self._world.note(call)

    def _use_timeout(self, seconds: float) -> None:
        """Each call reads the timeout of its group."""

    @property
    def thread_world(self) -> ThreadWorld:
        """What all simulated ranks of the job share."""
        return self._world

    def wait_until(
        self,
        signature: CallSignature,
        ready: Callable[[], bool],
        timeout: float | None = None,
        missing: Callable[[], set[int]] | None = None,
        limit_s: float | None = None,
    ) -> None:
        """Hand on the turn until something holds that another rank brings about.

        Whoever brings it about calls ``wake_conditions`` of its world.

        Args:
            signature: what a report of this wait shows.
            ready: whether it holds.
            timeout: seconds that this call wants to wait; None: ``limit_s``, as all calls do.
            missing: the ranks in the job that have to do something; None: any other.
            limit_s: None: the timeout of this group.

        Raises:
            CommTimeout: it does not hold in time.
            DeadlockError: no rank can bring it about.
            RankFailed: a rank has aborted this group.
        """
        rank = self.ranks[self.rank]
        call = self._number(signature, blocking=True, is_message=True)
        others = [other for other in range(self._world.size) if other != rank]
        aborted = self._world.aborted
        condition = PendingCondition(rank, others, lambda: self.name in aborted or ready(), missing)
        limit_s = self.timeout if limit_s is None else limit_s
        self._world.wait_until(condition, call, timeout, limit_s)
        self._refuse_if_aborted(call)

    def batch(self) -> AbstractContextManager[None]:
        """The messages that this rank issues in the body are one operation, as in a batch of c10d.

        Where messages match by their tags, that changes nothing.
        """
        return self._world.batch(self.ranks[self.rank])

    def abort(self, cause: str) -> None:
        """Let all ranks fail that wait in this group, or communicate in it from now on.

        Args:
            cause: what this rank did, after its number in a sentence.
        """
        world = self._world
        with world.lock:
            world.aborted.setdefault(self.name, (self.ranks[self.rank], cause))
            pending: list[Pending] = []
            for key in [key for key in world.meetings if key[0] == self.name]:
                pending.append(world.meetings.pop(key))
            for place in [place for place in world.mail if place[0] == self.name]:
                pending += world.mail.pop(place)
            pending += [each for each in world.rules.queued(self.name) if each not in pending]
        world.wake_conditions()
        for each in pending:
            each.error = self._aborted(f"a call of group {self.name!r}")
            world.carry_out(world.complete(each))

    def _aborted(self, doing: object) -> RankFailed:
        rank, cause = self._world.aborted[self.name]
        return RankFailed(rank, cause, str(doing))

    def _refuse_if_aborted(self, doing: object) -> None:
        if self.name in self._world.aborted:
            raise self._aborted(doing)

    def note(self, signature: CallSignature) -> None:
        """Record a call that communicates nothing, for reports of what this rank did last."""
        self._number(signature, blocking=True, is_message=True)

    def probe(self, tag: int) -> int | None:
        """A rank that has sent a message with ``tag`` whose receive is not posted yet, or None."""
        for (name, src, dst, sent_tag), queue in self._world.mail.items():
            is_ours = (name, dst, sent_tag) == (self.name, self.rank, tag)
            if is_ours and queue and "send" in queue[0].sides:
                return src
        return None

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work:
        act = _ACTS.get(type(operation))
        if act is not None:
            if not self.has_tags:
                self._world.open_communicator(self.name, self.ranks, None, call, self.timeout)
            return self._meet(call, operation, act, self._rules)
        if type(operation) is Send:
            return self._mail(call, operation.tensor, self.rank, operation.dst, operation.tag)
        assert type(operation) is Receive
        return self._mail(call, operation.tensor, operation.src, self.rank, operation.tag)

    def _meet(
        self, call: CollectiveCall, item: T, act: Act[T], rules: RankRules = _SETUP
    ) -> _ThreadWork:
        """Join a collective with ``item``; ``act`` runs on the items of all ranks.

        Groups and memory are set up beside the operations of ranks, and wait for none of them.
        """
        world = self._world
        with world.lock:
            world.admit(call)
            if self._world.aborted:
                self._refuse_if_aborted(call)
            key = (self.name, call.position)
            meeting = world.meetings.get(key)
            if meeting is None:
                meeting = world.meetings[key] = PendingCollective(self.ranks, call, item)
                meeting.carry_out = partial(self._carry_out, act)
            meeting.calls[self.rank] = call
            meeting.items[self.rank] = item
            world.join(meeting, call)
            if not meeting.absent:
                del world.meetings[key]
            ready = rules.issued(meeting, call)
        if ready:
            world.carry_out(ready)
        return _ThreadWork(call, world, meeting, self._timeout)

    def _carry_out(self, act: Act[Any], meeting: PendingCollective) -> None:
        """Do the work of all ranks."""
        try:
            self._agree(meeting.calls)
            with (
                self._world.watch.around(self.ranks, meeting.calls, meeting.items),
                torch.inference_mode(),  # inference tensors of ranks can be written only in it
            ):
                act(meeting.items, meeting.calls)
        except Exception as error:  # raised on every rank that waits
            meeting.error = self._noted(error, meeting.calls[0].rank)
        meeting.items.clear()

    def _noted(self, error: Exception, rank: int) -> Exception:
        if self._rules.has_queues and isinstance(error, CollectiveMismatch):
            self._world.note_mismatch(rank, error)
        return error

    def _agree(self, calls: Sequence[CollectiveCall]) -> None:
        first = calls[0]
        for call in calls:
            if call.signature != first.signature:
                texts = {c.rank: f"{c.signature} at {c.place}" for c in calls}
                raise CollectiveMismatch(self.name, first.position, texts)

    def _mail(self, call: CollectiveCall, tensor: Tensor, src: int, dst: int, tag: int) -> Work:
        world, op, rules = self._world, call.signature.op, self._rules
        ends = self.ranks[src], self.ranks[dst]
        if not self.has_tags:
            world.open_communicator(self.name, self.ranks, ends, call, self.timeout)
        with world.lock:
            world.admit(call)
            self._refuse_if_aborted(call)
            place = (self.name, src, dst, rules.channel(tag, call.rank))
            queue = world.mail.setdefault(place, deque())
            if not queue or op in queue[0].sides:  # the other side has not joined yet
                transfer = PendingMessage(ends)
                transfer.carry_out = self._deliver
                queue.append(transfer)
            else:
                transfer = queue.popleft()
            transfer.sides[op] = MessageSide(self.rank, call, tensor, tag)
            world.join(transfer, call)
            ready = rules.issued(transfer, call)
        if ready:
            world.carry_out(ready)
        else:
            world.wake_conditions()  # somebody may wait for a message from any rank
        return _ThreadWork(call, world, transfer, self.timeout)

    def _deliver(self, transfer: PendingMessage) -> None:
        try:
            self._move(transfer)
        except Exception as error:  # raised on both ranks
            transfer.error = self._noted(error, transfer.expected[0])
        transfer.sides.clear()  # the work of one rank must not keep the tensor of the other

    def _move(self, transfer: PendingMessage) -> None:
        send, receive = transfer.sides["send"], transfer.sides["recv"]
        source, target = send.tensor, receive.tensor
        fits = source.dtype == target.dtype and source.numel() == target.numel()
        if not fits or send.tag != receive.tag:
            texts = {
                side.call.rank: f"{side.call.signature} at {side.call.place}"
                for side in transfer.sides.values()
            }
            raise CollectiveMismatch.of_message(self.name, texts, in_order=not self.has_tags)
        operations = [Send(source, receive.rank, 0), Receive(target, send.rank, 0)]
        watching = self._world.watch.around(
            transfer.expected, [send.call, receive.call], operations
        )
        with watching, torch.inference_mode():
            target.copy_(source)

    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int], device: torch.device | None
    ) -> ThreadGroup | None:
        self._meet(call, None, _nothing).wait()
        if self.rank not in members:
            return None
        return ThreadGroup(
            self._world,
            members.index(self.rank),
            [self.ranks[member] for member in members],
            name=name,
            device=device or self.device,
            rules=self._rules if device is None else self._world.rules.of_host(),
        )

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        regions: list[Tensor] = []
        local = zeros(numel, dtype, self.device, what=f"a window of {numel} elements on a rank")

        def act(items: list[tuple[list[Tensor], Tensor]], calls: Calls) -> None:
            for regions_of_rank, _ in items:
                regions_of_rank.extend(region for _, region in items)

        self._meet(call, (regions, local), act).wait()
        if not self.shares_memory:
            return Window(local, (local,), shared=False)
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
            calls[
                rank
            ].rank: f"sends {sent[rank]}, expects {expected[rank]} elements at {calls[rank].place}"
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
