"""From unsharded gradients on every rank to reduced shards of them.

::

    gradients of a unit ─ one fused copy ─> slot (a window) ─ reduce-scatter ─> this rank's shard

A slot is used by one reduction after another; who needs it next waits until the last one is over.

Gradients are copied into a slot in the current order of execution, so their memory may be freed at
once; what follows is on the reduce stream. Where gradients are kept on the host, the reduced
ones are copied there on that stream, and the host waits for them when it hands them over.

[Note: a reduction that others are late for]
Where unshards communicate, a rank must not wait for a reduction while others may wait for its next
unshard before they join it: a rank that got no gradient for some parameter of a unit
learns only at the end of its backward that none will come. There, on the CPU, a slot is waited for
with patience once. From then on gradients that find their slot in use travel in memory of their
own. On an accelerator waiting is for its streams, and the program runs far ahead of them, so every
reduction would find its slot in use; slots are waited for.

[Note: accumulated in the dtype of the reduction]
The reduced gradients of several backwards are added in the dtype they were reduced in. Where
``.grad`` cannot hold every value of that dtype, the sum is kept beside it, and ``.grad`` is the sum
rounded. What the user writes into ``.grad`` counts: it replaces the sum before the next addition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.streams import StreamEvent, is_cpu
from echelon.comm.work import Work
from echelon.errors import CommTimeout
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.storage import Storage, shaped_shard
from echelon.modules.sharded_gradients import GradientScope, mark

PATIENCE_S = 1.0  # far more than a reduction takes once all ranks have sent it


@final
class Slots:
    """Windows that gradients travel in, used in turn; every rank has the same."""

    def __init__(self, group: Group, numel: int, dtype: torch.dtype, count: int) -> None:
        self._windows = [group.window(numel, dtype) for _ in range(count)]
        self._users: list[Reduction | None] = [None] * count
        self._next = 0
        self._patience_s = PATIENCE_S  # see the note: a reduction that others are late for

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(window.numel * window.dtype.itemsize for window in self._windows)

    def take(self, user: Reduction, *, wait: bool) -> Tensor | None:
        """The memory of the next slot, 1D, when whoever had it has finished.

        Args:
            wait: however long that takes. If not, and others are late, the answer is None.
        """
        last = self._users[self._next]
        if last is not None:
            if not wait and not last.comes_within(self._patience_s):
                self._patience_s = 0.0
                return None
            last.vacate()
        at, self._next = self._next, (self._next + 1) % len(self._windows)
        self._users[at] = user
        return self._windows[at].local


@final
class GradientShard:
    """This rank's shard of the gradients of one storage.

    Attributes:
        storage: whose.
        wire_dtype: in which gradients are reduced and accumulated.
        grad_dtype: of ``views``.
        slots: where they travel.
        views: what ``.grad`` is, for each of ``storage.optimizer_params``; empty before their first
            use.
    """

    def __init__(
        self, storage: Storage, wire_dtype: torch.dtype, grad_dtype: torch.dtype, slots: Slots
    ) -> None:
        self.storage, self.slots = storage, slots
        self.wire_dtype, self.grad_dtype = wire_dtype, grad_dtype
        self.views: list[Tensor] = []
        self._flat: Tensor | None = None
        self._rounds = torch.promote_types(wire_dtype, grad_dtype) != grad_dtype
        self._sum: Tensor | None = None  # where ``views`` round: what they are rounded from
        self._version = 0  # of ``flat``, when it was the rounded sum
        self._slot_views: dict[int, list[list[Tensor]]] = {}  # by address of a slot
        if grad_dtype != storage.dtype:
            for param in storage.optimizer_params:
                param.grad_dtype = None  # otherwise torch insists on the parameter's own

    @property
    def nbytes(self) -> int:
        """Bytes of ``views``, and of the sum that they are rounded from, on the device."""
        return 0 if self.storage.devices.offloads else self._all_nbytes

    @property
    def host_nbytes(self) -> int:
        """The same on the host, where that is another memory."""
        return self._all_nbytes if self.storage.devices.offloads else 0

    @property
    def _all_nbytes(self) -> int:
        return sum(memory.nbytes for memory in (self._flat, self._sum) if memory is not None)

    @property
    def flat(self) -> Tensor:
        """The memory of ``views``, made when it is first used."""
        if self._flat is None:
            storage = self.storage
            self._flat = storage.devices.empty_shard(storage.shard_numel, self.grad_dtype).zero_()
            self.views = self._views_of(self._flat)
            if storage.sharded and storage.group.size > 1:
                scope = GradientScope(storage.group, storage.rows)
                self.views = [mark(view, scope) for view in self.views]
        return self._flat

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        storage = self.storage
        if storage.is_flat:
            return [flat]
        pairs = zip(storage.split_by_param(flat), storage.shards, strict=True)
        return [gradient.view(shard.shape) for gradient, shard in pairs]

    def fill(self, memory: Tensor, gradients: Sequence[Tensor | None], *, is_slot: bool) -> None:
        """Copy unsharded gradients into ``memory``, rank by rank if by rows; None is 0."""
        targets, sources = [], []
        all_views = self._views_in_slot(memory) if is_slot else self._views_in(memory)
        for views, gradient in zip(all_views, gradients, strict=True):
            if gradient is None:
                torch._foreach_zero_(views)
            elif len(views) == 1:
                targets.append(views[0])
                sources.append(gradient)
            else:
                rows = gradient if gradient.dim() else gradient.view(1)
                targets += views
                sources += rows.split([view.shape[0] for view in views])
        if targets:
            torch._foreach_copy_(targets, sources)

    def _views_in_slot(self, memory: Tensor) -> list[list[Tensor]]:
        views = self._slot_views.get(memory.data_ptr())
        if views is None:
            views = self._slot_views[memory.data_ptr()] = self._views_in(memory)
        return views

    def _views_in(self, memory: Tensor) -> list[list[Tensor]]:
        """Where the gradient of each parameter goes: one view, or by rows one for each rank."""
        if self.storage.rows:
            return self._by_rank(memory)
        return [[view] for view in self.storage.views_in(memory)]

    def _by_rank(self, memory: Tensor) -> list[list[Tensor]]:
        layout = self.storage.layout
        views: list[list[Tensor]] = [[] for _ in layout.shapes]
        end = 0
        for ranges in layout.ranges:
            for span in ranges:
                flat = memory[end : end + span.numel]
                views[span.member].append(shaped_shard(flat, layout.shapes[span.member], True))
                end += span.numel
        return views

    def set_aside(self) -> list[bool] | None:
        """Take reduced gradients off their parameters, so that backward writes unsharded new ones.

        They stay in ``views``, to be added to.

        Returns:
            Which of ``storage.optimizer_params`` had one; None if none had.
        """
        params = self.storage.optimizer_params
        had = [param.grad is not None for param in params]
        if not any(had):
            return None
        sums = self._sum_views()  # makes the views, if this is their first use
        for param, view, kept in zip(params, self.views, sums, strict=True):
            if param.grad is None:
                kept.zero_()
            elif param.grad is not view:  # the user's own
                kept.copy_(param.grad)
            elif kept is not view and self.flat._version != self._version:
                kept.copy_(view)  # the user wrote into it
            param.grad = None
        return had

    def put_back(self, had: Sequence[bool] | None) -> None:
        """Undo ``set_aside``, which returned ``had``, when parameters are sharded again."""
        if had is not None:
            for param, view, old in zip(
                self.storage.optimizer_params, self.views, had, strict=True
            ):
                if old:
                    param.grad = view

    def _sum_views(self) -> list[Tensor]:
        """What the next gradients are added to, in the shapes of ``views``."""
        if self._sum is None:
            _ = self.flat
            return self.views
        return self._views_of(self._sum)

    def take(self, reduced: Tensor, *, add: bool) -> None:
        """Take reduced gradients, in the wire dtype, in the place of the old ones or on top."""
        flat = self.flat
        if self._rounds:
            if add and self._sum is not None:
                self._sum.add_(reduced)
            else:
                self._sum = (flat.to(self.wire_dtype) + reduced) if add else reduced.clone()
            flat.copy_(self._sum)
            self._version = flat._version
        elif not add:
            if reduced is not flat:
                flat.copy_(reduced)
        elif flat.dtype == self.wire_dtype:
            flat.add_(reduced)
        else:
            flat.copy_(flat.to(self.wire_dtype) + reduced)


@final
class Reduction:
    """The gradients of one storage in one backward, on their way.

    Args:
        shard: where they go.
        had: what ``set_aside`` returned; new gradients are added to those.
        options: how gradients of ranks become one.
        replicas: ranks with the same shard, each in another shard group.
        unshards_come: whether other ranks may wait for an unshard of this one in this backward.
    """

    def __init__(
        self,
        shard: GradientShard,
        had: list[bool] | None,
        options: FSDPOptions,
        replicas: Group | None,
        *,
        unshards_come: bool,
    ) -> None:
        self.shard, self.had = shard, had
        self.present: list[bool] = []  # parameters that have a gradient here
        self.came: Sequence[bool] = []  # what optimizers see and some rank has a gradient for
        self._options, self._replicas, self._unshards_come = options, replicas, unshards_come
        self._devices = shard.storage.devices
        self._work: Work | None = None
        self._output: Tensor | None = None
        self._event: StreamEvent | None = None  # when the result is where it is kept
        self._is_over = False

    def start(self, gradients: list[Tensor | None]) -> None:
        """Launch the reduction; empties ``gradients`` when they are copied, before they travel."""
        shard, stream = self.shard, self._devices.reduce_stream
        self.present = [gradient is not None for gradient in gradients]
        numel = shard.storage.layout.numel
        slot = shard.slots.take(self, wait=self._may_wait)
        if slot is None:
            memory = torch.empty(numel, dtype=shard.wire_dtype, device=self._devices.device)
        else:
            memory = slot[:numel]
        shard.fill(memory, gradients, is_slot=slot is not None)
        gradients.clear()
        stream.wait_for_current()  # or it sends a slot that is still being filled
        with stream.as_current():
            self._work = self._send(memory, async_op=not stream.queued)
        if self._work is None:
            self._land()

    def _send(self, memory: Tensor, *, async_op: bool) -> Work | None:
        shard, storage, op = self.shard, self.shard.storage, self._options.op
        group, label = storage.group, self._label
        if not storage.sharded:
            self._output = memory
            return group.all_reduce(memory, op, async_op, label=label)
        direct = self._is_direct and not self._devices.offloads
        self._output = shard.flat if direct else memory.new_empty(storage.shard_numel)
        splits = storage.numels_by_rank
        return group.reduce_scatter_single(
            self._output, memory, op, async_op, splits=splits, label=label
        )

    @property
    def _may_wait(self) -> bool:
        """See the note: a reduction that others are late for."""
        group = self.shard.storage.group
        if group.shares_memory or self._replicas is not None or not is_cpu(group.device):
            return True  # replicas reduce when this has landed, and in one order
        return not self._unshards_come

    def comes_within(self, seconds: float) -> bool:
        """Whether the reduction is over by then, so that ``vacate`` returns at once."""
        work = self._work
        if work is None or work.done():
            return True
        if not seconds:
            return False
        try:
            work.wait(seconds)
        except CommTimeout:
            if work.done():
                raise  # it has failed by itself
            return False
        return True

    @property
    def _is_direct(self) -> bool:
        """Whether the result is ``.grad`` as it comes."""
        return self.had is None and self.shard.wire_dtype == self.shard.grad_dtype

    @property
    def _label(self) -> str:
        return f"gradients of {self.shard.storage.label}"

    def _land(self) -> None:
        """The reduction is over, in its stream: move the result to where it is kept."""
        output = self._output
        assert output is not None
        with self._devices.reduce_stream.as_current():
            if self._replicas is not None:
                self._replicas.all_reduce(output, self._options.op, label=self._label)
            if (divisor := self._options.divisor()) != 1:
                output.div_(divisor)
            if self._devices.offloads:
                landed = self.shard.flat
                if not self._is_direct:
                    landed = self._devices.empty_on_host(output.numel(), output.dtype)
                self._output = landed.copy_(output, non_blocking=True)
            else:
                self.shard.take(output, add=self.had is not None)
                self._output = None
        self._event = self._devices.reduce_stream.record_event()

    def vacate(self) -> None:
        """From now on the slot may be used again; on CUDA the host goes on."""
        work, self._work = self._work, None
        if work is not None:
            with self._devices.reduce_stream.as_current():
                work.wait()
            self._land()
        if self._event is not None:  # it left
            self._event.wait()

    def finish(self) -> None:
        """Wait, and leave the result in the views."""
        if self._is_over:
            return
        self._is_over = True
        self.vacate()
        if self._output is not None:  # on the host, which does not add before it has come
            assert self._event is not None
            self._event.synchronize()
            self.shard.take(self._output, add=self.had is not None)
            self._output = None

    def hand_over(self, anywhere: Sequence[bool]) -> None:
        """Make the views ``.grad`` of what some rank has a gradient for.

        Args:
            anywhere: by parameter.
        """
        storage = self.shard.storage
        self.came = came = [any(anywhere)] if storage.is_flat else anywhere
        had = self.had or [False] * len(came)
        for param, view, new, old in zip(
            storage.optimizer_params, self.shard.views, came, had, strict=True
        ):
            if new or old:
                param.grad = view
