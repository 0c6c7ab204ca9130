"""When gradients are reduced: which bucket leaves when, and what happens at the end of backward.

[Note: life of a backward]
A hook on the outputs of forward sees backward begin, before any gradient is made, and queues a
callback for its end in the same graph task; with reentrant checkpointing that is the outer one. A
hook on each parameter counts; a bucket whose count is zero is moved into its buffer and leaves, in
the order of the buckets. The callback sends what is left, waits for all, and finishes the
gradients. What one backward knows is in a ``BackwardHook``, so an aborted one leaves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from echelon import events
from echelon.comm.group import Group
from echelon.ddp.backward_hook import BackwardHook
from echelon.ddp.bucket_memory import Bucket
from echelon.ddp.buckets import BucketPlan, Gradient, plan_buckets
from echelon.ddp.grad_ready_counter import GradReadyCounter
from echelon.ddp.gradient_state import GradientState, graph_is_lost
from echelon.ddp.join import JoinStep, Rounds
from echelon.ddp.options import DDPOptions
from echelon.errors import StateError
from echelon.modules.autograd import Token, add_gradient, queue_end
from echelon.modules.deferred_hooks import DeferredHooks
from echelon.modules.parameters import TrainableParameters


@final
class Reducer:
    """Reduces the gradients of ``named`` parameters over ``group``.

    Attributes:
        buckets: in the order in which they leave; made by ``allocate``.
        unused: indices of parameters without a gradient in the last reduction: here; everywhere.
        noticed: whether a rank answered ``notice`` with True since this was last set to False.
        rounds: how ranks agree on each step while some have no batches left; None outside ``join``.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        options: DDPOptions,
        notice: Callable[[], bool] | None = None,
    ) -> None:
        self.buckets: tuple[Bucket, ...] = ()
        self.unused: tuple[list[int], list[int]] = ([], [])
        self.noticed = False
        self.rounds: Rounds | None = None
        self._group = group
        self._named = list(named)
        self._options = options
        self._notice = notice
        self._world_rank = group.ranks[group.rank]
        self._overlap = options.sync == "overlap"
        self._syncing = True
        self._state = GradientState(self._named, options, group.size)
        self._backward: BackwardHook | None = None
        self._trainable = TrainableParameters(self._named, group)
        self._order: list[int] | None = None  # of arrival, in the first reduction
        self._ordered = not self._overlap  # whether the plan follows the order of arrival
        self._late = DeferredHooks(self._named)
        self._arrivals = GradReadyCounter([param for _, param in self._named], self, self._late)
        self._plans = self._plan(None)

    # Memory ----------------------------------------------------------------------------------

    def _plan(self, order: Sequence[int] | None) -> tuple[BucketPlan, ...]:
        """Cut the parameters into buckets, and hook them."""
        options = self._options
        gradients = []
        for _, param in self._named:
            nbytes = param.numel() * options.wire_dtype(param.dtype).itemsize
            gradients.append(Gradient(param.numel(), nbytes, param.dtype))
        plans = plan_buckets(gradients, options.bucket_bytes, options.first_bucket_bytes, order)
        if self._overlap or self._state.factor != 1:
            self._arrivals.watch(plans, record=not self._ordered)
        return plans

    def allocate(self) -> None:
        """Make the buckets. All ranks of the group call it."""
        for b, plan in enumerate(self._plans):
            dtype = self._options.wire_dtype(self._named[plan.members[0]][1].dtype)
            self.buckets += (Bucket(b, plan, self._named, self._group, dtype),)

    def close(self) -> None:
        """Leave the parameters alone, and give the memory back."""
        self._discard_aborted()
        self._arrivals.unwatch()
        self._late.close()
        self._close_buckets()

    def _close_buckets(self) -> None:
        buckets, self.buckets = self.buckets, ()
        for bucket in buckets:
            bucket.close()

    def _prepare(self) -> None:
        """Make the buckets of a copy, or make them anew in the order of arrival."""
        if self._order is not None and not self._ordered:
            self._ordered = True
            order = torch.tensor(self._order, device=self._group.device)
            if self._group.size > 1:
                source = self.rounds.first_active if self.rounds is not None else 0
                self._group.broadcast(order, source, label="order of gradients")
            self._close_buckets()
            self._plans = self._plan(order.tolist())
        if not self.buckets:
            self.allocate()

    def defer_hooks(self) -> None:
        """Let hooks of users wait that were registered since the last forward or backward."""
        self._late.defer()

    # Hooks call these ------------------------------------------------------------------------

    def begin(self, first: int | None = None) -> None:
        """A backward begins, if none is under way. Called inside the engine.

        Args:
            first: the parameter whose gradient is there already, as nothing announced the backward.
        """
        if self._current() is not None:
            return
        self._late.defer(None if first is None else self._named[first][1])
        reduces = self._syncing and self._overlap
        if reduces and torch.is_grad_enabled():
            self._state.check_graph()
        token = queue_end(self._finish if reduces else None)
        if reduces:
            self._start(BackwardHook(token, synced=True), first)
        else:
            self._backward = BackwardHook(token, synced=False)
            if first is not None or self._state.will_change():
                self._make_local(first)

    def large(self, b: int, slot: int) -> None:
        """Move a large gradient at once."""
        with torch.no_grad():
            self.buckets[b].take_one(slot)

    def ready(self, b: int) -> None:
        """Move the gradients of a complete bucket, and send what may leave in order."""
        current = self._backward
        assert current is not None
        remaining = self._arrivals.remaining
        with torch.no_grad():
            self.buckets[b].take()
            while len(current.works) < len(remaining) and not remaining[len(current.works)]:
                self._launch(current, ())

    def unexpected(self, i: int, b: int) -> None:
        """A gradient came in no backward, in one that does not reduce, or a second time in one."""
        current = self._current()
        if current is None:
            # No output of forward led here: it hides in an object, or is not from forward.
            self.begin(first=i)
            if self._syncing and self._overlap:
                # The buckets may be new, so the numbers that the hook knows may be old.
                b = next(b for b, plan in enumerate(self._plans) if i in plan.members)
                self._arrivals.arrive(i, b, self._plans[b].members.index(i))
        elif current.synced and (b < len(current.works) or self.buckets[b].casts):
            raise StateError(
                f"parameter {self._named[i][0]!r} got a second gradient in one backward, after the "
                f"first left with the {self.buckets[b].label}. Reentrant activation checkpointing "
                "of a shared module does that: use checkpoint(..., use_reentrant=False), or run "
                "backward under no_sync() and call sync_gradients() after it"
            )

    # A reduction -----------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """While the body runs, a backward accumulates local gradients and does not communicate."""
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before

    def reduce_now(self, *, may_be_none: bool) -> None:
        """Reduce what ``.grad`` of every parameter holds now.

        Args:
            may_be_none: whether a rank without local gradients takes part with nothing.

        Raises:
            StateError: inside ``no_sync`` or a backward, or the gradients are reduced already.
        """
        if not self._syncing:
            raise StateError("sync_gradients() inside no_sync(): leave the block first")
        if self._current() is not None:
            raise StateError("sync_gradients() inside backward: call it after loss.backward()")
        if not may_be_none:
            self._state.check_sync(self.buckets)
        if any(p.grad is not None and p.grad.requires_grad for _, p in self._named):
            raise graph_is_lost()
        self._late.defer()
        self._make_local(None)
        token = Token()
        self._start(BackwardHook(lambda: token, synced=True), None)
        self._finish()

    def add(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a local gradient to ``.grad``, whatever that holds."""
        self._make_local(None)
        add_gradient(param, gradient)

    def _make_local(self, first: int | None) -> None:
        self._state.make_local(self.buckets, first, ranks_may_leave=self.rounds is not None)

    def shadow(self) -> None:
        """Take part in a reduction of the other ranks, with nothing of our own."""
        assert self.rounds is not None
        self._discard_aborted()
        self._trainable.compare(at_once=True, has_batch=False)
        self._prepare()
        current = BackwardHook(lambda: None, synced=True, num_contributors=len(self.rounds.active))
        for bucket in self.buckets:
            bucket.drop()
            bucket.wire.zero_()
        for _ in self.buckets:
            self._launch(current, None)
        self._wait(current)
        self._trainable.compare(at_once=False, has_batch=False)
        self._state.reduced = False
        self._order = self._order or list(range(len(self._named)))  # a rank with batches knows it

    def _start(self, new: BackwardHook, first: int | None) -> None:
        self._discard_aborted()
        self._trainable.compare(at_once=True)
        new.num_contributors = self._group.size
        if self.rounds is not None:
            new.num_contributors = len(self.rounds.announce(JoinStep.BACKWARD))
        with torch.no_grad():
            if self._state.reduced:
                self._state.check_unmixed(self.buckets, first)
                kept = None if first is None else self._named[first][1]
                for bucket in self.buckets:
                    new.olds.update(bucket.set_aside(kept))
            self._prepare()
        self._state.reduced = False
        self._arrivals.open([len(bucket.members) for bucket in self.buckets])
        self._backward = new
        if events.listening():
            events.emit("ddp.backward", rank=self._world_rank, phase="begin")

    def _launch(self, current: BackwardHook, missing: Sequence[int] | None) -> None:
        """Send the next bucket.

        Args:
            missing: slots without a gradient here; None: all zeros, flags included.
        """
        b = len(current.works)
        bucket = self.buckets[b]
        if missing is not None:
            bucket.flag(missing)
        if b == len(self.buckets) - 1:
            bucket.notices[0] = self._notice is not None and self._notice()
            bucket.notices[1] = missing is not None and self._trainable.changed()
        if events.listening():
            events.emit("ddp.bucket", rank=self._world_rank, bucket=b, nbytes=bucket.nbytes)
        work = None
        if self._group.size > 1:
            work = self._group.all_reduce(bucket.wire, self._op, async_op=True, label=bucket.label)
        current.works.append(work)
        current.missing.append(missing or ())

    @property
    def _op(self) -> str:
        # Inside join the mean is over the ranks that have a batch, which the group does not know.
        return "mean" if self._options.reduction == "mean" and self.rounds is None else "sum"

    def _launch_rest(self, current: BackwardHook) -> None:
        """Send the buckets that wait for gradients which did not come."""
        for b in range(len(current.works), len(self.buckets)):
            bucket = self.buckets[b]
            # A gradient of an earlier backward under no_sync, or of the user, counts.
            missing = [slot for slot, param in enumerate(bucket.params) if param.grad is None]
            if self._arrivals.remaining[b] and not missing:
                bucket.take()
            elif self._arrivals.remaining[b]:
                for slot in range(len(bucket.members)):
                    if slot in missing:
                        bucket.zero(slot)
                    else:
                        bucket.take_one(slot)
            self._launch(current, missing)

    def _finish(self) -> None:
        """Backward is over: send what is left, wait for all, finish the gradients."""
        current = self._backward
        assert current is not None
        with torch.no_grad():
            self._launch_rest(current)
            self._arrivals.close()
            self.unused = self._wait(current)
            if current.olds:
                for bucket in self.buckets:
                    bucket.put_back(current.olds)
        self._backward = None
        self._state.reduced = True
        for bucket in self.buckets:
            bucket.remember()
        if self._order is None:
            came = dict.fromkeys(self._arrivals.order)
            old = (i for plan in self._plans for i in plan.members)
            self._order = [*came, *(i for i in old if i not in came)]
        if events.listening():
            events.emit("ddp.backward", rank=self._world_rank, phase="end")
        self._trainable.compare(at_once=False)
        nowhere = {*self.unused[1]}
        members = ((i, p) for b in self.buckets for i, p in zip(b.members, b.params, strict=True))
        self._late.run(param for i, param in members if i not in nowhere)

    def _wait(self, current: BackwardHook) -> tuple[list[int], list[int]]:
        """Wait for every bucket and finish its gradients; who was unused here, and everywhere."""
        here: list[int] = []
        everywhere: list[int] = []
        divisor = 1.0 if self._op == "mean" else self._options.divisor(current.num_contributors)
        for bucket, work, missing in zip(self.buckets, current.works, current.missing, strict=True):
            if work is not None:
                work.wait()
            nowhere = bucket.settle(divisor, missing)
            here += [bucket.members[slot] for slot in missing]
            everywhere += [bucket.members[slot] for slot in nowhere]
        notices = self.buckets[-1].notices
        if self._notice is not None and bool(notices[0] != 0):
            self.noticed = True
        self._trainable.take_answer(notices[1:])
        return sorted(here), sorted(everywhere)

    # State -----------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a backward is under way."""
        return self._current() is not None

    def _current(self) -> BackwardHook | None:
        """The backward under way, or None when there is none or it was aborted."""
        if self._backward is not None and self._backward.token() is None:
            return None
        return self._backward

    def _discard_aborted(self) -> None:
        """Let the communication of an aborted backward end before its buffers are used again."""
        aborted, self._backward = self._backward, None
        if aborted is not None:
            for work in aborted.works:
                if work is not None:
                    work.wait()
