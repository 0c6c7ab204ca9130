"""The kinds of storage, and which kind a group of parameters gets.

- ``SharedStorage``: the unsharded buffer is shared memory, which all ranks see. If the compute
  dtype is that of the shards, the shards are views of it, so an optimizer step writes the unsharded
  parameters and nothing is copied.
- ``GatheredStorage``: every rank has its shards, and a buffer that an all-gather fills and a
  reshard frees.
- ``ReplicatedStorage``: every rank has all elements.

Where shards are on the host (``ShardDevices``), they are never views of memory of the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass

from echelon.comm.buffers import out_of_memory
from echelon.comm.streams import device_of
from echelon.comm.work import Work
from echelon.fsdp.local_shard import LocalShard, ShardDevices
from echelon.fsdp.policy import Layout, Offload
from echelon.fsdp.shard_layout import ALIGN_NBYTES, layout_by_element, layout_by_rows, place_order
from echelon.fsdp.storage import Storage
from echelon.fsdp.units import Member


class _StaysUnsharded(Storage):
    """A storage whose ``unsharded`` is valid after each refresh, when all ranks have met."""

    def unshard(self, *, async_op: bool = False) -> None:
        pass

    def wait_for_unshard(self) -> None:
        pass

    def reshard(self) -> None:
        pass


@final
class SharedStorage(_StaysUnsharded):
    """One unsharded buffer that all ranks of the group share."""

    shares_unsharded = True

    def _allocate(self) -> None:
        buffer = self.group.shared_tensor(self.layout.numel, self.compute_dtype)
        self.unsharded = self.views_in(buffer)
        in_buffer = [self.layout.starts[span.member] + span.start for span in self.local_ranges]
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        if not self.is_recast:
            self.shards = self._local_shard_views(buffer, in_buffer)
            if not self.rows:
                first = sum(self.layout.numels_by_rank[: self.group.rank])
                self.flat_shard = buffer[first : first + self.shard_numel]
        else:
            self._local = LocalShard(self.shard_numel, self.dtype, self.compute_dtype, self.devices)
            self.flat_shard, packed = self._local.masters, self._packed_offsets
            self.shards = self._local_shard_views(self._local.masters, packed)
            self._sources = self._local_shard_views(self._local.staged, packed)
            self._targets = self._local_shard_views(buffer, in_buffer)

    def refresh(self) -> None:
        if self._local is not None:
            self._local.refresh()
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)

    @property
    def unsharded_nbytes(self) -> int:
        return 0 if self._local is None else self.shard_numel * self.compute_dtype.itemsize


@final
class GatheredStorage(Storage):
    """Shards in one buffer, and an unsharded buffer that has memory from unshard to reshard.

    Autograd saves views of the unsharded buffer in forward and reads them in backward. So the
    buffer is one ``UntypedStorage`` that is resized to zero and back, not a new tensor each time.
    Its memory belongs to the unshard stream. Torch resizes no storage whose memory others may hold,
    as by ``Tensor.numpy()``: they keep it, with what autograd saved, and the buffer gets another.
    """

    communicates = True
    _local: LocalShard

    def _allocate(self) -> None:
        devices = self.devices
        self._device = device_of(devices.device)
        mirrors, compute = devices.offload is Offload.OPTIMIZER, self.compute_dtype
        self._local = LocalShard(self.part_numel, self.dtype, compute, devices, mirrors=mirrors)
        self._local.masters[self.shard_numel :].zero_()  # the padding
        self.flat_shard = self._local.masters[: self.shard_numel]
        self.shards = self._local_shard_views(self._local.masters, self._packed_offsets)
        devices.unshard_stream.wait_for_current()
        with devices.unshard_stream.as_current():
            padded = self.layout.padded_numel
            self._buffer = self._empty(self.layout.numel if self.rows else padded)
            # It receives the parts of all ranks. By element they are the parameters.
            self._parts = self._empty(padded) if self.rows else self._buffer
        self.unsharded = self.views_in(self._buffer)
        self._moves = self._moves_of_rows() if self.rows else ([], [])
        self._work: Work | None = None  # an all-gather under way
        self._event = devices.unshard_stream.record_event()  # the end of the last all-gather
        self._set_memory(self._parts, allocated=False)
        self.reshard()

    def _empty(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self.compute_dtype, device=self.devices.device)

    def _set_memory(self, buffer: Tensor, *, allocated: bool) -> None:
        memory, nbytes = buffer.untyped_storage(), buffer.nbytes if allocated else 0
        if memory.nbytes() != nbytes:
            if not memory.resizable():
                memory = self._move_to_new_memory(memory)
            self._device.resize(memory, nbytes)

    def _move_to_new_memory(self, shown: torch.UntypedStorage) -> torch.UntypedStorage:
        """Give the buffer and its views new memory, with no values, in the place of ``shown``."""
        memory = torch.UntypedStorage(shown.nbytes(), device=shown.device)
        for view in (self._buffer, *self.unsharded, *self._moves[0]):
            view.set_(memory, view.storage_offset(), view.shape, view.stride())
        return memory

    def refresh(self) -> None:
        self._local.refresh()

    def unshard(self, *, async_op: bool = False) -> None:
        stream, self.is_filling = self.devices.unshard_stream, True
        buffers = [self._buffer] if self._parts is self._buffer else [self._buffer, self._parts]
        with stream.as_current():
            try:
                self._gather(buffers, async_op=async_op and not stream.queued)
            except torch.OutOfMemoryError as error:
                for buffer in buffers:
                    self._set_memory(buffer, allocated=False)
                self.is_filling = False
                what, nbytes = f"the all-gather of {self.label}", sum(b.nbytes for b in buffers)
                raise out_of_memory(what, nbytes, self.devices.device, error) from error
        self._event = stream.record_event()

    def _gather(self, buffers: Sequence[Tensor], *, async_op: bool) -> None:
        """Allocate what the all-gather of this rank writes to, and start it."""
        for buffer in buffers:
            self._set_memory(buffer, allocated=True)
        self._work = self.devices.unshard_group.all_gather_single(
            self._parts, self._part_to_send(), async_op=async_op, label=self.label
        )
        if self._work is None:
            self._reorder()

    def wait_for_unshard(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._reorder()
        # The current stream waits for the all-gather; otherwise forward would read too early.
        self._event.wait()
        self.is_filling = False

    def _reorder(self) -> None:
        """By rows, copy the shards of all ranks to the places of their parameters."""
        if not self.rows:
            return
        targets, sources = self._moves
        if targets:
            torch._foreach_copy_(targets, sources)
        self._set_memory(self._parts, allocated=False)

    def _moves_of_rows(self) -> tuple[list[Tensor], list[Tensor]]:
        """Views of the buffer, and of the parts from which they are copied."""
        targets, sources = [], []
        for whole, shape, pieces in zip(
            self.unsharded, self.layout.shapes, self.row_pieces, strict=True
        ):
            for piece in pieces:
                source, stop = (
                    piece.view(self._parts, shape),
                    piece.start + piece.count * piece.numel,
                )
                targets.append(whole.view(-1)[piece.start : stop].view(source.shape))
                sources.append(source)
        return targets, sources

    def _part_to_send(self) -> Tensor:
        """This rank's part in the compute dtype, with padding; called on the unshard stream."""
        packed = self._local.send_buffer()
        if self.is_sent_packed:
            return packed
        part = torch.zeros_like(packed)
        torch._foreach_copy_(
            self._local_shard_views(part, self._sent_offsets),
            self._local_shard_views(packed, self._packed_offsets),
        )
        return part

    def reshard(self) -> None:
        # The unshard stream waits for the current one, which may still read the memory.
        self.devices.unshard_stream.wait_for_current()
        self._set_memory(self._buffer, allocated=False)

    @property
    def unsharded_nbytes(self) -> int:
        return self._buffer.untyped_storage().nbytes()


@final
class ReplicatedStorage(_StaysUnsharded):
    """All elements on every rank: for small units, and for ``NO_SHARD``."""

    sharded = False
    _local: LocalShard

    def _allocate(self) -> None:
        numel, compute = self.layout.numel, self.compute_dtype
        self.local_ranges = layout_by_element(self.layout.shapes, 1).ranges_of(0)
        self.shard_numel = self.part_numel = numel
        self._local = LocalShard(numel, self.dtype, compute, self.devices)
        self.flat_shard = self._buffer = self._local.masters
        if self.is_recast:
            self._buffer = torch.empty(numel, dtype=compute, device=self.devices.device)
        self.shards = self.views_in(self._local.masters)
        self.unsharded = self.views_in(self._buffer)

    def refresh(self) -> None:
        if self._buffer is self._local.masters:
            return
        stream = self.devices.unshard_stream
        self._local.refresh()
        with stream.as_current():
            self._buffer.copy_(self._local.staged, non_blocking=True)
        stream.record_event().wait()  # otherwise forward would read old values

    @property
    def unsharded_nbytes(self) -> int:
        return 0 if self._buffer is self._local.masters else self._buffer.nbytes


def make_storage(
    members: Sequence[Member],
    devices: ShardDevices,
    layout: Layout,
    dtype: torch.dtype,
    compute: torch.dtype,
    label: str,
    *,
    sharded: bool,
) -> Storage:
    """Allocate memory for ``members``; ``replace_param_by_shard`` fills it."""
    numels = [member.param.numel() for member in members]
    ordered = [members[i] for i in place_order(numels, dtype.itemsize)]
    shapes = [tuple(member.param.shape) for member in ordered]
    rows = layout == "rows"
    # Shared memory of the device is never freed, so ``Offload.ALL`` does not use it.
    shared = devices.group.shares_memory and devices.offload is not Offload.ALL
    kind = ReplicatedStorage if not sharded else SharedStorage if shared else GatheredStorage
    size, align = devices.group.size, None
    if kind is GatheredStorage and size > 1:
        align = ALIGN_NBYTES // min(dtype.itemsize, compute.itemsize)
    ranges = (layout_by_rows if rows else layout_by_element)(shapes, size, align)
    return kind(ordered, ranges, devices, dtype, compute, label, rows=rows and sharded)


def copy_storage(storage: Storage, members: Sequence[Member]) -> Storage:
    """Allocate a storage like ``storage`` for copies of its members, and copy the shards.

    All ranks call it where memory is shared. Nothing is sent.
    """
    for member in members:
        member.param.requires_grad_(storage.requires_grad)
    clone = type(storage)(
        members,
        storage.layout,
        storage.devices,
        storage.dtype,
        storage.compute_dtype,
        storage.label,
        rows=storage.rows,
    )
    clone.classes = storage.classes
    with torch.no_grad():
        for param, shard, value in zip(clone.params, clone.shards, storage.shards, strict=True):
            shard.copy_(value)
            with DisableTorchFunctionSubclass():
                param.data = shard
        clone.show_parts()
    return clone
