"""Reductions: from the unsharded gradients of all ranks to reduced shards of them.

::

    gradients of a unit ─ one fused copy ─> slot (a window) ─ reduce-scatter ─> this rank's shard

A slot is used by one reduction after another: a reduction waits until the one before it is over.
Where ranks share no memory, slots have none between backwards, and sharded gradients none from the
forward on that finds no ``.grad``: activations need it then.

Gradients are copied into a slot on the current stream, so their memory may be freed at once. All
that follows is on the reduce stream, and the reduction over replicas on a stream of its own, so
that the next reduction of shards does not wait for it. A slot is free when the reduction of shards
is over. Where gradients are kept on the host, that stream copies the
reduced ones there, and the host waits for the copy at the end of backward.

[Note: a reduction that others are late for]
A rank that gets no gradient of some parameter of a unit learns only at the end of its backward that
none will come, and reduces the unit then. Where unshards communicate, it may wait for the next
unshard of another rank before that, so the other rank must not wait for the reduction. On the CPU,
a rank waits for a slot at most ``PATIENCE_S`` once. From then on gradients whose slot is in use
travel in memory of their own. On an accelerator the streams wait, and the program runs far ahead of
them, so every slot would look as if it were in use: there, slots are always waited for.

[Note: accumulated in the dtype of the reduction]
The reduced gradients of several backwards are added in the dtype they were reduced in. Where
``.grad`` cannot hold every value of that dtype, the sum is kept separately, and ``.grad`` is the
rounded sum. If the user writes into ``.grad``, that replaces the sum before the next addition: all
of it where the version counter of ``.grad`` shows a write, and else, as ``.data`` does not count
versions, the elements that are not the rounded sum any more.

[Note: gradients that no_sync keeps]
They belong to ``.grad``, which is a ``KeptGradient`` until the next backward takes them off, or the
reduction by hand. So they are dropped, or moved, by what drops or moves ``.grad`` in one process,
for each parameter by itself. It also has the reduced gradient that ``.grad`` was before.

[Note: gradients that somebody keeps]
After ``zero_grad()`` a new backward may write over the memory of the earlier gradients, unless
somebody still holds one of them, or a view of one: plain torch lets them be. Each reference to a
tensor or its memory is counted, so a count that is higher than ours alone shows it, and the new
gradients get new memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import repeat
from operator import is_
from typing import NamedTuple, final

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from echelon.comm.buffers import out_of_memory
from echelon.comm.group import Group
from echelon.comm.streams import StreamEvent, device_of
from echelon.comm.work import Window, Work
from echelon.errors import CommTimeout, DeviceMemoryError
from echelon.fsdp.gradient_buffer import GradientBuffer
from echelon.fsdp.policy import FSDPOptions
from echelon.fsdp.storage import Storage
from echelon.modules.held_memory import count_references
from echelon.modules.sharded_tensor import (
    KeptGradient,
    ShardedTensor,
    Sharding,
    grad_of,
    kept_gradient,
    refuse_kept,
    set_grad,
)

_WRITTEN = -1  # a version that no tensor has
PATIENCE_S = 1.0  # far more than a reduction takes once all ranks have sent it


@final
class Slots:
    """Memory in which gradients travel, used in turn; all ranks have the same slots.

    Where ranks share memory, slots are windows. Elsewhere a slot has memory from the first
    reduction of a backward that uses it until the last one is over.
    """

    def __init__(self, group: Group, numel: int, dtype: torch.dtype, count: int) -> None:
        self._windows: list[Window] = []
        if group.shares_memory:
            self._windows = [group.window(numel, dtype) for _ in range(count)]
            self._slots = [window.local for window in self._windows]
        else:
            self._slots = [
                torch.empty(numel, dtype=dtype, device=group.device) for _ in range(count)
            ]
        self._device = device_of(group.device)
        self._users: list[Reduction | None] = [None] * count
        self._next = 0
        self._patience_s = PATIENCE_S  # see the note: a reduction that others are late for
        self.give_back()

    @property
    def nbytes(self) -> int:
        """The bytes of all slots."""
        return sum(slot.untyped_storage().nbytes() for slot in self._own) + sum(
            window.numel * window.dtype.itemsize for window in self._windows
        )

    @property
    def _own(self) -> list[Tensor]:
        """The slots whose memory is given back."""
        return [] if self._windows else self._slots

    def give_back(self) -> None:
        """Free the memory that no other rank sees; all reductions are over."""
        for i, slot in enumerate(self._own):
            self._users[i] = None
            self._device.resize(slot.untyped_storage(), 0)

    def acquire(self, user: Reduction, *, wait: bool) -> tuple[int, Tensor] | None:
        """Return the next slot, its index and memory (1D), when the reduction before has left it.

        Without ``wait``, return None if other ranks are late for that reduction.
        """
        before = self._users[self._next]
        if before is not None:
            if not wait and not before.is_over_within(self._patience_s):
                self._patience_s = 0.0
                return None
            before.release_slot()
        i, self._next = self._next, (self._next + 1) % len(self._slots)
        self._users[i] = user
        slot = self._slots[i]
        if not self._windows and not slot.untyped_storage().nbytes():
            self._device.resize(slot.untyped_storage(), slot.nbytes)
        return i, slot


class SetAside(NamedTuple):
    """What ``.grad`` of the parameters of one storage was.

    Attributes:
        reduced: which of the parameters of optimizers had a reduced gradient; None if none had.
        kept: by parameter of the storage, what ``no_sync`` has kept; None if that is nothing.
    """

    reduced: list[bool] | None
    kept: list[Tensor | None] | None


@final
class GradientShard:
    """This rank's shard of the gradients of one storage.

    Attributes:
        storage: the storage of the parameters.
        wire_dtype: the dtype in which gradients are reduced and accumulated.
        grad_dtype: the dtype of ``views``.
        slots: the slots in which the gradients travel.
        views: what ``.grad`` becomes, for each of ``storage.optimizer_params``; empty before
            ``flat`` is first used.
    """

    def __init__(
        self, storage: Storage, wire_dtype: torch.dtype, grad_dtype: torch.dtype, slots: Slots
    ) -> None:
        self.storage, self.slots = storage, slots
        self.wire_dtype, self.grad_dtype = wire_dtype, grad_dtype
        self.views: list[Tensor] = []
        self._flat: Tensor | None = None
        self._part: Tensor | None = None  # ``flat`` and the padding behind it
        self._addresses: list[int] = []  # of ``views``, whose memory users can exchange
        self._held_by_us: list[int] = []  # the references to ``views`` and ``flat``
        self._rounds = torch.promote_types(wire_dtype, grad_dtype) != grad_dtype
        self._sum: Tensor | None = None  # the exact sum, where ``views`` hold the rounded one
        self._version = 0  # of ``flat``, when it was last the rounded sum
        self._buffers: dict[int, GradientBuffer] = {}  # by index of the slot whose memory it is
        if grad_dtype != storage.dtype:
            for param in storage.optimizer_params:
                param.grad_dtype = None  # otherwise torch requires the dtype of the parameter

    @property
    def nbytes(self) -> int:
        """The bytes of ``views``, and of the exact sum, on the device."""
        return 0 if self.storage.devices.offloads else self._all_nbytes

    @property
    def host_nbytes(self) -> int:
        """The same bytes on the host, where that is another memory."""
        return self._all_nbytes if self.storage.devices.offloads else 0

    @property
    def _all_nbytes(self) -> int:
        return sum(memory.nbytes for memory in (self._flat, self._sum) if memory is not None)

    @property
    def flat(self) -> Tensor:
        """The memory of ``views``, 1D; allocated, with the views, when it is first used."""
        if self._flat is None:
            storage = self.storage
            part = storage.devices.empty_shard(storage.part_numel, self.grad_dtype).zero_()
            has_padding = storage.part_numel != storage.shard_numel
            self._part, self._flat = part, part[: storage.shard_numel] if has_padding else part
            # Of what is a view for autograd, ``p.grad.detach_()`` would be refused.
            views = map(Tensor.detach, self._views_of(self._flat))
            self.views = storage.mark_gradients([*views])
            with DisableTorchFunctionSubclass():
                self._addresses = [*map(Tensor.data_ptr, self.views)]
            self._held_by_us = count_references(self._flat, self.views)
        return self._flat

    def drop_unused(self) -> None:
        """Free the memory of gradients that no parameter has any more, after ``zero_grad()``.

        Gradients in memory that ranks share stay, so that the next ones are written there.
        """
        if self._flat is None or self.storage.group.shares_memory:
            return
        with DisableTorchFunctionSubclass():
            gradients = map(grad_of, self.storage.optimizer_params)
            if all(map(is_, gradients, repeat(None))):
                self._sum = None
                self._leave_memory()

    def _leave_memory(self) -> None:
        """Use new memory, and new views of it, from now on."""
        self._flat = self._part = None
        self._addresses, self.views = [], []

    def _leave_to_holders(self) -> None:
        """Use new memory from now on if somebody keeps gradients; see the note."""
        flat = self._flat
        if flat is not None and (
            count_references(flat, self.views) != self._held_by_us
            or [*map(Tensor.data_ptr, self.views)] != self._addresses
        ):
            self._leave_memory()

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        storage = self.storage
        if storage.is_flat:
            return [flat]
        pairs = zip(storage.split_by_param(flat), storage.shards, strict=True)
        return [gradient.view(shard.shape) for gradient, shard in pairs]

    def acquire_slot(self, user: Reduction, *, wait: bool) -> GradientBuffer:
        """The memory in which the gradients travel: a slot, or without one memory of its own."""
        slot = self.slots.acquire(user, wait=wait)
        if slot is None:
            numel, device = self.storage.layout.padded_numel, self.storage.devices.device
            return self._buffer_in(torch.empty(numel, dtype=self.wire_dtype, device=device))
        i, memory = slot
        if i not in self._buffers:
            self._buffers[i] = self._buffer_in(memory[: self.storage.layout.padded_numel])
        return self._buffers[i]

    def _buffer_in(self, memory: Tensor) -> GradientBuffer:
        if not self.storage.rows:
            return GradientBuffer(memory, self.storage.views_in(memory))
        views: list[Tensor | list[Tensor]] = []
        for pieces, shape in zip(self.storage.row_pieces, self.storage.layout.shapes, strict=True):
            parts = [piece.view(memory, shape) for piece in pieces]
            is_whole = len(parts) == 1 and parts[0].shape == shape
            views.append(parts[0] if is_whole else parts)
        return GradientBuffer(memory, views)

    @property
    def part(self) -> Tensor:
        """``flat`` and the padding behind it, as a reduction writes it."""
        _ = self.flat  # this allocates it
        assert self._part is not None
        return self._part

    def _check_not_taken(self, gradients: Sequence[Tensor | None]) -> None:
        """Refuse what was once ``.grad``, if it was set again after others were added to it."""
        for gradient in gradients:
            if isinstance(gradient, KeptGradient) and not gradient.unsharded:
                again = "setting .grad again after a later backward"
                refuse_kept(gradient, f"{'a backward' if gradient.is_lost else again}, a use")

    def show_kept(self, gradients: Sequence[Tensor | None]) -> None:
        """Let ``.grad`` have the unsharded gradients of ``storage.params`` that are kept."""
        if self.storage.is_flat:
            if any(gradient is not None for gradient in gradients):
                self._show_kept(0, list(gradients))
            return
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                self._show_kept(i, [gradient])

    def show_lost(self, was_kept: Sequence[bool]) -> None:
        """Let ``.grad`` say that what was kept of some of ``storage.params`` is lost."""
        for i, was in enumerate([any(was_kept)] if self.storage.is_flat else was_kept):
            if was:
                self._show_kept(i, []).is_lost = True

    def add_kept(self, i: int, gradient: Tensor) -> int:
        """Add an unsharded gradient of one of ``storage.params``; returns the bytes kept for it."""
        is_flat, num_params = self.storage.is_flat, len(self.storage.params)
        shown, place = (0, i) if is_flat else (i, 0)
        with DisableTorchFunctionSubclass():
            kept = self.storage.optimizer_params[shown].grad
        if not isinstance(kept, KeptGradient):
            kept = self._show_kept(shown, [None] * (num_params if is_flat else 1))
        self._check_not_taken([kept])
        before = kept.unsharded[place]
        total = kept.unsharded[place] = self.added(before, gradient)
        return total.nbytes if before is None else 0

    def added(self, kept: Tensor | None, gradient: Tensor) -> Tensor:
        """The sum of what is kept and a gradient, in the dtype of the reduction."""
        gradient = gradient.to(self.wire_dtype)
        return gradient if kept is None else kept + gradient

    def _show_kept(self, i: int, unsharded: list[Tensor | None]) -> KeptGradient:
        param = self.storage.optimizer_params[i]
        with DisableTorchFunctionSubclass():
            kept = kept_gradient(*self._without_values[i], unsharded, param.grad)
            param.grad = kept
        return kept

    @cached_property
    def _without_values(self) -> list[tuple[Tensor, Sharding]]:
        return self.storage.without_values(self.grad_dtype)

    @property
    def kept_nbytes(self) -> int:
        """The bytes of the unsharded gradients that ``.grad`` has."""
        with DisableTorchFunctionSubclass():
            gradients = map(grad_of, self.storage.optimizer_params)
            return sum(grad.kept_nbytes for grad in gradients if isinstance(grad, KeptGradient))

    def set_aside(self) -> SetAside:
        """Take gradients off their parameters, so that backward accumulates new ones.

        Reduced ones stay in ``views``, to be added to. The caller disables functions of parts.
        """
        params = self.storage.optimizer_params
        gradients = list(map(grad_of, params))
        if all(map(is_, gradients, repeat(None))):
            self._leave_to_holders()
            return SetAside(None, None)
        kept = self._take_kept(gradients) if KeptGradient in map(type, gradients) else None
        for param in params:
            param.grad = None
        has_reduced = [gradient is not None for gradient in gradients]
        if not any(has_reduced):
            self._leave_to_holders()
            return SetAside(None, kept)
        others = self._others(gradients)
        gradients.clear()  # or these references would count as those of somebody who keeps them
        if others:
            self._replace(others)
        return SetAside(has_reduced, kept)

    def _take_kept(self, gradients: list[Tensor | None]) -> list[Tensor | None]:
        """What ``no_sync`` has kept, replaced in ``gradients`` by what ``.grad`` was before it."""
        self._check_not_taken(gradients)
        kept: list[Tensor | None] = []
        for i, gradient in enumerate(gradients):
            if isinstance(gradient, KeptGradient):
                unsharded, gradients[i] = gradient.hand_over()
                kept += unsharded
            else:
                kept += [None] * (len(self.storage.params) // len(gradients))
        return kept

    def _take_written(self, total: Tensor) -> None:
        """Let values that the user has written into ``.grad`` replace those of the exact sum."""
        flat = self.flat
        if flat._version != self._version:
            total.copy_(flat)
        else:  # what was written through ``.data`` counts no version
            torch.where(flat == total.to(flat.dtype), total, flat, out=total)

    def _others(self, gradients: Sequence[Tensor | None]) -> dict[int, Tensor | None]:
        """By index, what the user has set in the place of our view, or in that of its memory."""
        _ = self.flat  # this makes the views, if it is their first use
        shown = zip(gradients, self.views, self._addresses, strict=True)
        return {
            i: gradient
            for i, (gradient, view, address) in enumerate(shown)
            if gradient is not view or view.data_ptr() != address
        }

    def _replace(self, others: Mapping[int, Tensor | None]) -> None:
        """Let gradients be what the user has set; without a gradient the next one is the first."""
        before = self.flat
        is_written = before._version != self._version
        if any(other is self.views[i] for i, other in others.items()):
            self._leave_memory()  # that view is the user's, who has given it other memory
        else:
            self._leave_to_holders()
        if self.flat is not before:
            self.flat.copy_(before)
        for memory in (self.flat,) if self._sum is None else (self.flat, self._sum):
            values = self._views_of(memory)
            for i, other in others.items():
                values[i].zero_() if other is None else values[i].copy_(other)
        self._version = _WRITTEN if is_written else self.flat._version

    def put_back(self, reduced_before: Sequence[bool] | None) -> None:
        """Undo ``set_aside`` of reduced gradients; parameters are sharded again."""
        if reduced_before is not None:
            self.show(reduced_before)

    def show(self, has_gradient: Sequence[bool]) -> None:
        """Set ``.grad`` of those of ``storage.optimizer_params`` that have a gradient."""
        cls = ShardedTensor if self.storage.shows_parts else Tensor
        with DisableTorchFunctionSubclass():
            for param, view, has in zip(
                self.storage.optimizer_params, self.views, has_gradient, strict=True
            ):
                if has:
                    view.__class__ = cls  # a step that has raised leaves plain ones
                    set_grad(param, view)

    def accumulate(self, reduced: Tensor, *, add: bool) -> None:
        """Write reduced gradients, in the wire dtype, over the earlier ones, or add them."""
        flat = self.flat
        if self._rounds:
            if add and self._sum is not None:
                self._take_written(self._sum)
                self._sum.add_(reduced)
            else:
                self._sum = (flat.to(self.wire_dtype) + reduced) if add else reduced.clone()
            flat.copy_(self._sum)
            self._version = flat._version
        elif not add:
            if reduced.data_ptr() != flat.data_ptr():
                flat.copy_(reduced)
        elif flat.dtype == self.wire_dtype:
            flat.add_(reduced)
        else:
            flat.copy_(flat.to(self.wire_dtype) + reduced)


@final
class Reduction:
    """The reduction of the gradients of one storage in one backward.

    The result is added to the gradients that ``shard.set_aside()`` returned, ``reduced_before``.
    ``replicas`` are the ranks with the same shard, each in another shard group. With
    ``unshards_follow``, other ranks may wait for an unshard of this rank in this backward. What is
    added to earlier gradients is added at the end, since a backward that raises leaves these alone.

    Attributes:
        used_here: by parameter, whether it has a gradient on this rank.
        has_new_gradient: by parameter of the optimizer, whether a rank has a gradient of it.
    """

    def __init__(
        self,
        shard: GradientShard,
        reduced_before: list[bool] | None,
        options: FSDPOptions,
        replicas: Group | None,
        *,
        unshards_follow: bool,
    ) -> None:
        self.shard, self._reduced_before = shard, reduced_before
        self.used_here: list[bool] = []
        self.has_new_gradient: Sequence[bool] = []
        self._options, self._replicas, self._unshards_follow = options, replicas, unshards_follow
        self._devices = shard.storage.devices
        self._work: Work | None = None
        self._output: Tensor | None = None
        self._left_slot: StreamEvent | None = None  # from then on nothing reads the slot
        self._event: StreamEvent | None = None  # the end of all that follows the reduction
        self._kept: Tensor | None = None  # what another stream reads than it was allocated on
        self._is_over = False

    def start(self, gradients: list[Tensor | None]) -> None:
        """Launch the reduction; empties ``gradients`` once they are copied, so they are freed.

        Raises:
            DeviceMemoryError: the device has no memory for it.
        """
        try:
            self._start(gradients)
            if self._work is None:
                self._store()
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(error) from error

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> DeviceMemoryError:
        """The error that says for whose gradients the device has no memory."""
        nbytes = self.shard.storage.layout.padded_numel * self.shard.wire_dtype.itemsize
        return out_of_memory(self._label, nbytes, self._devices.device, error)

    def _start(self, gradients: list[Tensor | None]) -> None:
        shard, storage, stream = self.shard, self.shard.storage, self._devices.reduce_stream
        self.used_here = [gradient is not None for gradient in gradients]
        buffer = shard.acquire_slot(self, wait=self._may_wait)
        buffer.fill(gradients)
        gradients.clear()
        memory, op, async_op = buffer.memory, self._options.op, not stream.queued
        stream.wait_for_current()  # otherwise it sends a slot that is still being filled
        with stream.as_current():
            if storage.sharded:
                in_place = self._is_direct and not self._devices.offloads and storage.is_sent_packed
                self._output = shard.part if in_place else memory.new_empty(storage.part_numel)
                self._work = storage.group.reduce_scatter_single(
                    self._output,
                    memory,
                    op,
                    async_op,
                    splits=storage.splits,
                    label=self._label,
                )
            else:
                self._output = memory
                self._work = storage.group.all_reduce(memory, op, async_op, label=self._label)

    @property
    def _may_wait(self) -> bool:
        """Whether to wait for a slot; see the note: a reduction that others are late for."""
        group = self.shard.storage.group
        if (
            group.shares_memory
            or self._replicas is not None
            or device_of(group.device).reading_waits
        ):
            return True  # replicas reduce after this, in one order on all ranks
        return not self._unshards_follow

    def is_over_within(self, seconds: float) -> bool:
        """Wait for the reduction at most this long; returns whether it is over."""
        work = self._work
        if work is None or work.done():
            return True
        if not seconds:
            return False
        try:
            work.wait(seconds)
        except CommTimeout:
            if work.done():
                raise  # the reduction itself has timed out
            return False
        return True

    @property
    def _is_direct(self) -> bool:
        """Whether the result is ``.grad`` without an addition or a cast."""
        return self._reduced_before is None and self.shard.wire_dtype == self.shard.grad_dtype

    @property
    def _label(self) -> str:
        return f"gradients of {self.shard.storage.label}"

    def _store(self) -> None:
        """Move the result to where it is kept; the reduction is over, or queued on the stream."""
        assert self._output is not None
        storage, devices = self.shard.storage, self._devices
        self._kept = self._output if self._replicas is not None else None
        reduced = devices.reduce_stream.record_event()
        with devices.replica_stream.as_current():
            if self._replicas is not None:
                reduced.wait()  # otherwise it would reduce what is not there yet
            output = storage.without_padding(self._output)
            if self._replicas is not None:
                self._replicas.all_reduce(output, self._options.op, label=self._label)
            if (divisor := self._options.divisor()) != 1:
                output.div_(divisor)
            if devices.offloads:
                on_host = self.shard.flat
                if not self._is_direct:
                    on_host = devices.empty_on_host(output.numel(), output.dtype)
                self._output = on_host.copy_(output, non_blocking=True)
            elif self._reduced_before is not None:
                self._output = output if storage.sharded else output.clone()  # the slot is free
            else:
                self.shard.accumulate(output, add=False)
                self._output = None
        self._event = devices.replica_stream.record_event()
        self._left_slot = reduced if storage.sharded else self._event

    def release_slot(self) -> None:
        """Wait until the slot may be used again; on CUDA the current stream waits."""
        self._follow()
        if self._left_slot is not None:
            self._left_slot.wait()

    def _follow(self) -> None:
        """Wait for the reduction over the shard group, and issue what follows it."""
        work, self._work = self._work, None
        if work is not None:
            with self._devices.reduce_stream.as_current():
                work.wait()
            try:
                self._store()
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(error) from error

    def finish(self, *, keep: bool = True) -> None:
        """Wait for the reduction, and leave the result in the views, or drop it."""
        if self._is_over:
            return
        self._is_over = True
        self._follow()
        if self._event is not None:
            self._event.wait()
        if self._output is not None and self._devices.offloads:
            assert self._event is not None
            self._event.synchronize()  # the host adds when the copy is over
        if self._output is not None and keep:
            try:
                self.shard.accumulate(self._output, add=self._reduced_before is not None)
            except torch.OutOfMemoryError as error:
                raise self._out_of_memory(error) from error
        if self._kept is not None or (self._output is not None and not self._devices.offloads):
            # The stream that they belong to waits for the one that has read them.
            self._devices.reduce_stream.wait_for_current()
        self._kept = self._output = None

    def set_grads(self, used: Sequence[bool]) -> None:
        """Set ``.grad`` of what has a gradient; by parameter, whether a rank has ``used`` it."""
        storage = self.shard.storage
        is_new = [any(used)] if storage.is_flat else used
        self.has_new_gradient = is_new
        reduced_before = self._reduced_before or [False] * len(is_new)
        pairs = zip(is_new, reduced_before, strict=True)
        self.shard.show([new or before for new, before in pairs])
