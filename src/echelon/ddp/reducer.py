"""When gradients are reduced: which bucket is launched when, and the end of a backward.

[Note: life of a backward]
A hook on the outputs of forward sees backward begin, before any gradient is made, and queues a
callback for its end in the same graph task; with reentrant checkpointing that is the outer one::

    prepare_for_backward   expect one gradient of each parameter in each bucket
      hook of a parameter  GradReadyCounter: one gradient less is pending in its bucket
      bucket_ready         no gradient is pending: fill the buffer, and launch in order
      _launch_bucket       start the all-reduce of the buffer, beside the rest of backward
    _finalize_backward     launch the other buckets, wait for all, divide, run hooks of users

[Note: aborted backwards]
A backward that raises may be caught on all ranks, which then go on. When its token dies,
``.grad`` becomes again what it was, None or a reduced gradient, so that an optimizer may step
at once and all ranks do the same. Its reductions may still be under way, and other ranks may have
failed before, so nothing waits there: the next thing that a user asks for does. Local gradients
have what autograd added, as in one process.

What belongs to one backward is in a ``BackwardRecord``, so an aborted one leaves nothing else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import final

import torch
from torch import Tensor, nn

from echelon import events
from echelon.comm.group import Group
from echelon.comm.streams import device_of
from echelon.comm.work import Work
from echelon.ddp.buckets import (
    BUFFERS_CHANGED,
    LOOKS_LATE,
    PARAMETERS_WRITTEN,
    SET_ASIDE,
    SETS_NONE_ASIDE,
    TRAINABLE_CHANGED,
    Bucket,
    BucketPlan,
    plan_buckets,
)
from echelon.ddp.grad_ready_counter import GradReadyCounter
from echelon.ddp.gradient_state import GradientState, graph_is_lost, kept_differ
from echelon.ddp.join import JoinStep, Rounds
from echelon.ddp.options import DDPOptions
from echelon.ddp.replicas import ReplicaWatch
from echelon.ddp.reports import UnusedIndices
from echelon.errors import StateError
from echelon.modules.autograd import (
    Token,
    add_gradient,
    is_of_inputs_only,
    queue_end,
    token_of_body,
)
from echelon.modules.deferred_hooks import DeferredHooks
from echelon.modules.parameters import LateAnswer, TrainableParameters
from echelon.modules.wrapper import check_may_sync

_grad = attrgetter("grad")


@final
@dataclass(slots=True)
class BackwardRecord:
    """One backward, or one call of ``sync_gradients``.

    Attributes:
        token: returns None when the backward is over or was aborted.
        synced: whether the backward reduces gradients.
        num_contributors: the number of ranks that have a batch in it.
        works: the all-reduces of the buckets that were launched, in order.
        missing: for each of those buckets, the slots without a gradient on this rank.
        has_shares: whether gradients of this rank have shares of earlier reductions in them.
        reduced_before: gradients of earlier reductions, to be added, by index of the parameter.
        none_before: the parameters that had no gradient when it began.
        state_before: what ``.grad`` held then, if it is aborted: whether a reduced gradient, and
            whether a local one with shares of earlier reductions in it.
    """

    token: Callable[[], Token | None]
    synced: bool
    num_contributors: int = 0
    works: list[Work | None] = field(default_factory=list)
    missing: list[Sequence[int]] = field(default_factory=list)
    has_shares: bool = False
    reduced_before: dict[int, Tensor] = field(default_factory=dict)
    none_before: Sequence[int] = ()
    state_before: tuple[bool, bool] = (False, False)


@final
class Reducer:
    """Reduces the gradients of the parameters in ``named`` over ``group``.

    ``changed_buffers`` tells whether buffers of this rank differ from those that the ranks last
    agreed on, and is called before each reduction; None: buffers are not watched. ``replicas``
    compares the parameters of ranks.

    Attributes:
        buckets: the buckets in the order in which they are launched; ``allocate`` makes them.
        unused: the parameters that got no gradient in the last reduction.
        rounds: how ranks agree on each step while some have no batches left; None outside ``join``.
    """

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        group: Group,
        options: DDPOptions,
        replicas: ReplicaWatch,
        changed_buffers: Callable[[], bool] | None = None,
    ) -> None:
        self.buckets: tuple[Bucket, ...] = ()
        self.unused = UnusedIndices([], [])
        self._buffers_changed = False
        self._buffers_answer = LateAnswer()
        self.rounds: Rounds | None = None
        self._group = group
        self._named = list(named)
        self._options = options
        self._replicas, self._changed_buffers = replicas, changed_buffers
        self._world_rank = group.ranks[group.rank]
        self._overlap = options.sync == "overlap"
        self._syncing = True
        self._entered_no_sync = False
        self._kept_differ = LateAnswer()
        self._reading_waits = device_of(group.device).reading_waits
        self._state = GradientState(self._named, options, group.size)
        self._backward: BackwardRecord | None = None
        self._trainable = TrainableParameters(self._named, group)
        self._ready_order: list[int] | None = None  # of gradients, in the first reduction
        self._is_rebuilt = not self._overlap  # whether the plan follows that order
        self._user_hooks = DeferredHooks(self._named)
        self._params = [param for _, param in self._named]
        self._counter = GradReadyCounter(self._params, self, self._user_hooks)
        self._plans = self._plan_buckets(None)

    # Buckets ---------------------------------------------------------------------------------

    def _plan_buckets(self, order: Sequence[int] | None) -> tuple[BucketPlan, ...]:
        """Cut the parameters into buckets, and hook them."""
        plans = plan_buckets(self._params, self._options, order)
        if self._overlap or self._state.factor != 1:
            self._counter.register_hooks(plans, record=not self._is_rebuilt)
        return plans

    @torch.inference_mode(mode=False)  # gradients outlive the caller's mode
    def allocate(self) -> None:
        """Make the buckets. All ranks of the group call it."""
        for b, plan in enumerate(self._plans):
            dtype = self._options.wire_dtype(self._named[plan.indices[0]][1].dtype)
            self.buckets += (Bucket(b, plan, self._named, self._group, dtype),)

    def close(self) -> None:
        """Remove all hooks from the parameters, and give the memory back."""
        self._discard_aborted()
        self._counter.remove_hooks()
        self._user_hooks.close()
        self._close_buckets()

    def _close_buckets(self) -> None:
        buckets, self.buckets = self.buckets, ()
        for bucket in buckets:
            bucket.close()

    def _rebuild_buckets(self) -> None:
        """Make the buckets of a deep copy, which has none yet, or replace them after a backward.

        That is done once, after the first one, in the order in which gradients were ready in it.
        """
        if self._ready_order is not None and not self._is_rebuilt:
            self._is_rebuilt = True
            order = torch.tensor(self._ready_order, device=self._group.device)
            if self._group.size > 1:
                source = self.rounds.first_active if self.rounds is not None else 0
                self._group.broadcast(order, source, label="order of gradients")
            self._close_buckets()
            self._plans = self._plan_buckets(order.tolist())
        if not self.buckets:
            self.allocate()

    # Backward, in the order in which things happen -------------------------------------------

    def defer_hooks(self) -> None:
        """Defer the hooks that users have registered since the last forward or backward."""
        self._user_hooks.defer()

    def prepare_for_backward(self, arrived: int | None = None) -> None:
        """Begin a backward, if none is under way; the autograd engine calls it.

        ``arrived`` is the parameter whose gradient is already there, because no output of forward
        has announced the backward; None if an output has.
        """
        if self._current() is not None:
            return
        self._discard_aborted()
        self._user_hooks.defer(None if arrived is None else self._named[arrived][1])
        reduces = self._syncing and self._overlap
        if reduces and arrived is None:  # other ranks may have no backward of inputs only
            reduces = not is_of_inputs_only(self._params)
        if reduces and torch.is_grad_enabled():
            self._state.check_graph()
        token = queue_end(self._finalize_backward if reduces else None, self._set_back)
        if reduces:
            self._start(BackwardRecord(token, synced=True), arrived)
        else:
            self._backward = BackwardRecord(token, synced=False)
            if self._state.reduced and (arrived is not None or self._state.accumulates()):
                self._make_local(arrived)

    def _start(self, backward: BackwardRecord, arrived: int | None) -> None:
        """Expect one gradient of every parameter."""
        self._trainable.compare(at_once=True)
        self._replicas.compare_if_written(at_once=True)
        self._check_kept()
        backward.num_contributors = self._group.size
        if self.rounds is not None:
            backward.num_contributors = len(self.rounds.announce(JoinStep.BACKWARD))
        else:  # a rank without batches does not step, so its parameters are other ones
            self._replicas.check.count_reduction()
        if self._state.reduced:
            self._state.check_unmixed(self.buckets, arrived)
        # A gradient that has arrived on top of a reduced one is a local one, with its share in it.
        is_mixed = self._state.reduced and arrived is not None
        reduced, has_shares = self._state.reduced, self._state.has_shares
        backward.state_before = reduced and not is_mixed, has_shares or is_mixed
        is_none = map(is_, map(_grad, self._params), repeat(None))
        backward.none_before = list(compress(range(len(self._params)), is_none))
        self._backward = backward
        with torch.no_grad():
            for bucket in self.buckets:
                bucket.leave_to_holders()
            if self._state.reduced:
                local = None if arrived is None else self._named[arrived][1]
                for bucket in self.buckets:
                    backward.reduced_before.update(bucket.detach_reduced(local))
            self._rebuild_buckets()
        backward.has_shares, self._state.has_shares = self._state.has_shares, False
        self._state.reduced = False
        self._counter.expect([len(bucket.indices) for bucket in self.buckets])
        if events.listening():
            events.emit("ddp.backward", rank=self._world_rank, phase="begin")

    def bucket_ready(self, b: int) -> None:
        """Fill the buffer of a bucket, and launch all buckets that are ready, in their order."""
        backward = self._backward
        assert backward is not None
        pending = self._counter.pending
        with torch.no_grad():
            self.buckets[b].copy_in()
            while len(backward.works) < len(pending) and not pending[len(backward.works)]:
                self._launch_bucket(backward, ())

    def unexpected_gradient(self, i: int, b: int) -> None:
        """Handle a gradient outside of a reducing backward, or the second one of a parameter."""
        backward = self._current()
        if backward is None:
            # No output of forward has announced this backward: it is in an object that is not
            # searched, or the loss does not come from forward.
            self.prepare_for_backward(arrived=i)
            if self._syncing and self._overlap:
                # The buckets may have been replaced since the hook was made, so ``b`` may be old.
                b = next(b for b, plan in enumerate(self._plans) if i in plan.indices)
                self._counter.count(i, b)
        elif backward.synced and (b < len(backward.works) or self._is_cast(b)):
            raise StateError(
                f"parameter {self._named[i][0]!r} got a second gradient in one backward, after the "
                f"first left with the {self.buckets[b].label}. Reentrant activation checkpointing "
                "of a shared module does that: use checkpoint(..., use_reentrant=False), or run "
                "backward under no_sync() and call sync_gradients() after it"
            )

    def _is_cast(self, b: int) -> bool:
        """Whether what will be reduced is a copy already, to which nothing can be added."""
        return self.buckets[b].casts and not self._counter.pending[b]

    def _launch_bucket(self, backward: BackwardRecord, missing: Sequence[int]) -> None:
        """All-reduce the next bucket, with the flags and notices of a rank that has a batch.

        ``missing`` are the slots that have no gradient.
        """
        bucket = self.buckets[len(backward.works)]
        bucket.set_flags(missing)
        if bucket is self.buckets[-1]:
            bucket.notices[TRAINABLE_CHANGED] = self._trainable.changed()
            bucket.notices[PARAMETERS_WRITTEN] = self._replicas.is_written
            sets_aside = bool(backward.reduced_before)
            bucket.notices[SET_ASIDE] = sets_aside
            bucket.notices[SETS_NONE_ASIDE] = backward.has_shares or not sets_aside
        self._all_reduce_bucket(backward, missing)

    def _all_reduce_bucket(self, backward: BackwardRecord, missing: Sequence[int]) -> None:
        """All-reduce the next bucket, with the notices that a rank without a batch gives, too."""
        b = len(backward.works)
        bucket = self.buckets[b]
        if b == len(self.buckets) - 1:
            changed = self._changed_buffers
            bucket.notices[BUFFERS_CHANGED] = changed is not None and changed()
            bucket.notices[LOOKS_LATE] = self._looks_late
        if events.listening():
            events.emit("ddp.bucket", rank=self._world_rank, bucket=b, nbytes=bucket.nbytes)
        work = None
        if self._group.size > 1:
            work = self._group.all_reduce(bucket.wire, self._op, async_op=True, label=bucket.label)
        backward.works.append(work)
        backward.missing.append(missing)

    @property
    def _op(self) -> str:
        """The operation of the all-reduces.

        Inside join the mean is over the ranks that have a batch, which the group does not know.
        """
        return "mean" if self._options.reduction == "mean" and self.rounds is None else "sum"

    def _finalize_backward(self) -> None:
        """End a backward: launch the remaining buckets, wait for all, finish the gradients."""
        backward = self._backward
        assert backward is not None
        with torch.no_grad():
            self._launch_remaining(backward)
            self._counter.expect_none()
            self.unused = self._wait(backward)
            self._replicas.is_written = False  # unless aborted before, all ranks know of it
            self._take_notices(backward)
            if backward.reduced_before:
                for bucket in self.buckets:
                    bucket.add_reduced(backward.reduced_before)
        self._backward = None
        self._state.reduced = True
        for bucket in self.buckets:
            bucket.remember_version()
        if self._ready_order is None:
            self._ready_order = self._counter.ready_order(self._plans)
        if events.listening():
            events.emit("ddp.backward", rank=self._world_rank, phase="end")
        self._trainable.compare(at_once=False)
        self._replicas.compare_if_written(at_once=False)
        unused = set(self.unused.everywhere)
        indices = (i for bucket in self.buckets for i in bucket.indices)
        self._user_hooks.run(self._named[i][1] for i in indices if i not in unused)

    def _launch_remaining(self, backward: BackwardRecord) -> None:
        """Launch the buckets that still wait for a gradient, which backward did not make."""
        for b in range(len(backward.works), len(self.buckets)):
            bucket = self.buckets[b]
            # ``.grad`` may also come from an earlier backward under no_sync, or from the user.
            missing = [slot for slot, param in enumerate(bucket.params) if param.grad is None]
            if self._counter.pending[b]:
                bucket.copy_in(missing)
            self._launch_bucket(backward, missing)

    def _wait(self, backward: BackwardRecord) -> UnusedIndices:
        """Wait for every bucket, finish its gradients, and return the unused parameters."""
        here: list[int] = []
        everywhere: list[int] = []
        divisor = self._divisor_of(backward)
        launched = zip(self.buckets, backward.works, backward.missing, strict=True)
        for bucket, work, missing in launched:
            if work is not None:
                work.wait()
            here += [bucket.indices[slot] for slot in missing]
            everywhere += [bucket.indices[slot] for slot in bucket.finalize(divisor, missing)]
        return UnusedIndices(sorted(here), sorted(everywhere))

    def _divisor_of(self, backward: BackwardRecord) -> float:
        """The divisor for the sums of this backward."""
        return 1.0 if self._op == "mean" else self._options.divisor(backward.num_contributors)

    def _take_notices(self, backward: BackwardRecord) -> None:
        """Keep what the ranks have said with the last bucket, until it is asked for.

        Where some have set a reduced gradient aside and others have not, it is completed here: all
        read the same notices, so all take part. Where reading waits for the device, ranks that
        never entered ``no_sync`` look at that in the next backward, and refuse to go on.
        """
        if not self.buckets:  # nothing carries a notice: buffers go out before each forward
            self._buffers_changed = self._changed_buffers is not None
            return
        notices = self.buckets[-1].notices
        if self._changed_buffers is not None and not self.buffers_changed:
            self._buffers_answer.take(notices[BUFFERS_CHANGED].view(1))
        self._trainable.answer.take(notices[TRAINABLE_CHANGED].view(1))
        if self._replicas.check.is_on and self.rounds is None:
            self._replicas.answer.take(notices[PARAMETERS_WRITTEN].view(1))
        if self._looks_late:
            differ = notices[SET_ASIDE] * notices[SETS_NONE_ASIDE]
            self._kept_differ.take(differ.view(1))
        elif notices[SET_ASIDE] and notices[SETS_NONE_ASIDE]:
            if notices[LOOKS_LATE]:
                raise kept_differ()
            num_summed = self._group.size if self._op == "mean" else backward.num_contributors
            self._state.complete_shares(
                backward.reduced_before, self._group, num_summed, has_shares=backward.has_shares
            )

    def _check_kept(self) -> None:
        """Refuse what would follow a reduction of which some ranks read the notices only now."""
        if self._kept_differ.is_yes():
            raise kept_differ()

    @property
    def _looks_late(self) -> bool:
        """Whether this rank reads in the next backward whether ranks differ in what they keep."""
        return self._reading_waits and not self._entered_no_sync

    @property
    def buffers_changed(self) -> bool:
        """Whether buffers of a rank have changed since this was last set to False.

        It is read before a forward, when the device has long reduced the answer: after a backward
        the host would wait for all of its work.
        """
        self._buffers_changed = self._buffers_answer.is_yes() or self._buffers_changed
        return self._buffers_changed

    @buffers_changed.setter
    def buffers_changed(self, changed: bool) -> None:
        self._buffers_answer = LateAnswer()
        self._buffers_changed = changed

    # Without a backward ----------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """While the body runs, a backward accumulates local gradients and does not communicate."""
        before, self._syncing, self._entered_no_sync = self._syncing, False, True
        try:
            yield
        finally:
            self._syncing = before

    def reduce_now(self, *, may_be_none: bool) -> None:
        """Reduce what ``.grad`` holds now; ``may_be_none`` as in ``DDP.sync_gradients``."""
        check_may_sync(in_no_sync=not self._syncing, in_backward=self._current() is not None)
        self._discard_aborted()
        if not may_be_none:
            self._state.check_sync(self.buckets)
        if any(p.grad is not None and p.grad.requires_grad for _, p in self._named):
            raise graph_is_lost()
        self._user_hooks.defer()
        self._make_local(None)
        with token_of_body(self._set_back) as token:
            self._start(BackwardRecord(token, synced=True), None)
            self._finalize_backward()

    def add(self, param: nn.Parameter, gradient: Tensor) -> None:
        """Add a local gradient to ``.grad``, whatever that holds."""
        if not self.is_in_backward:
            self._discard_aborted()
        self._make_local(None)
        add_gradient(param, gradient)

    def _make_local(self, arrived: int | None) -> None:
        self._state.make_local(self.buckets, arrived, ranks_may_leave=self.rounds is not None)

    def shadow_backward(self) -> None:
        """Take part in a reduction of the other ranks, with zeros, as ``Join`` of torch does."""
        assert self.rounds is not None
        self._discard_aborted()
        self._trainable.compare(at_once=True, has_batch=False)
        self._check_kept()
        self._rebuild_buckets()
        num_contributors = len(self.rounds.active)
        backward = BackwardRecord(lambda: None, synced=True, num_contributors=num_contributors)
        for bucket in self.buckets:
            bucket.contribute_nothing()
        for _ in self.buckets:
            self._all_reduce_bucket(backward, ())
        self._wait(backward)
        self._take_notices(backward)
        self._trainable.compare(at_once=False, has_batch=False)
        self._state.reduced = self._state.has_shares = False
        # This order is never used: the order is broadcast from a rank that has batches.
        self._ready_order = self._ready_order or list(range(len(self._named)))

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward is under way."""
        return self._current() is not None

    def _current(self) -> BackwardRecord | None:
        """The backward under way, or None when there is none or it was aborted."""
        if self._backward is not None and self._backward.token() is None:
            return None
        return self._backward

    def _set_back(self, token: weakref.ref[Token]) -> None:
        """Set ``.grad`` back to what it was before an aborted backward, whose token has died."""
        aborted = self._backward
        if aborted is None or aborted.token is not token or not aborted.synced:
            return
        self._counter.expect_none()
        for i in aborted.none_before:
            self._params[i].grad = None
        for i, grad in aborted.reduced_before.items():
            self._params[i].grad = grad

    def _discard_aborted(self) -> None:
        """Finish the all-reduces of an aborted backward, and know again what ``.grad`` holds."""
        aborted, self._backward = self._backward, None
        if aborted is None or not aborted.synced:
            return
        with torch.no_grad():
            self._finish_aborted(aborted)

    def _finish_aborted(self, aborted: BackwardRecord) -> None:
        launched = self.buckets[: len(aborted.works)]
        divisor = self._divisor_of(aborted)
        for bucket, work in zip(launched, aborted.works, strict=True):
            if work is not None:
                work.wait()
            bucket.finalize(divisor, ())
        for bucket in self.buckets:
            bucket.put_back(aborted.reduced_before)
        self._state.reduced, self._state.has_shares = aborted.state_before
        if not self._state.reduced and self._state.factor != 1:
            for bucket in launched:  # local gradients that have left with it are reduced ones now
                bucket.scale(self._state.factor)
