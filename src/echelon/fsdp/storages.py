"""The kinds of storage, and which one a unit gets.

- ``SharedStorage``: the whole buffer is one piece of memory that all ranks see. Where the compute
  dtype is the shards' own, the parts are views of it: an optimizer step is a gather, and nothing
  is copied.
- ``GatheredStorage``: every rank has its parts, and a buffer that collectives fill and release
  empties.
- ``ReplicatedStorage``: every rank has everything.

Where own parts are on the host (``ShardDevices``), they are never views of what the device has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.work import Work
from echelon.fsdp.local_shard import LocalShard, make_local_shard, make_masters
from echelon.fsdp.policy import Layout, Offload
from echelon.fsdp.shard_devices import ShardDevices
from echelon.fsdp.shard_layout import cut_flat, cut_rows, place_order
from echelon.fsdp.storage import Storage
from echelon.fsdp.units import Member


@final
class SharedStorage(Storage):
    """One whole buffer for all ranks of the group, who share memory."""

    shares_wholes = True

    def _allocate(self) -> None:
        self.full = self.group.shared_tensor(self.cut.numel, self.compute_dtype)
        self.wholes = self.whole_views(self.full)
        in_full = [self.cut.starts[piece.member] + piece.start for piece in self.own]
        self._targets: list[Tensor] = []
        self._sources: list[Tensor] = []
        if self.compute_dtype == self.dtype and not self.places.offloads:
            self.locals = self._cut_out(self.full, offsets=in_full)
            if not self.rows:
                first = sum(self.cut.splits[: self.group.rank])
                self.part = self.full[first : first + self.own_numel]
        else:
            self._part = make_masters(self.own_numel, self.dtype, self.compute_dtype, self.places)
            self.part, packed = self._part.masters, self._packed_offsets()
            self.locals = self._cut_out(self._part.masters, offsets=packed)
            self._sources = self._cut_out(self._part.staged, offsets=packed)
            self._targets = self._cut_out(self.full, offsets=in_full)

    def prepare(self) -> None:
        if self._part is not None:
            self._part.prepare()
            torch._foreach_copy_(self._targets, self._sources, non_blocking=True)

    def gather(self, ahead: bool = False) -> None:
        pass  # valid since all ranks have prepared

    def arrive(self) -> None:
        pass  # so is it now

    def release(self) -> None:
        pass  # it is everyone's

    @property
    def whole_nbytes(self) -> int:
        return 0 if self._part is None else self.own_numel * self.compute_dtype.itemsize


@final
class GatheredStorage(Storage):
    """Own parts in one buffer, and a whole buffer that exists between gather and release.

    [Note: one buffer, many lives]
    Autograd saves views of the whole buffer in forward and reads them in backward, so it is one
    storage that loses and gets memory, not one tensor after another. The memory belongs to the
    stream of gathers: a release lets that stream follow the last use before it gives memory back.
    """

    moves = True
    _part: LocalShard

    def _allocate(self) -> None:
        places = self.places
        self._part = make_local_shard(self.own_numel, self.dtype, self.compute_dtype, places)
        self.part = self._part.masters
        self.locals = self._cut_out(self._part.masters, offsets=self._packed_offsets())
        places.gathers.wait_for_current()
        with places.gathers.as_current():
            self.full = torch.empty(self.cut.numel, dtype=self.compute_dtype, device=places.device)
        self.wholes = self.whole_views(self.full)
        self._by_rank = self.full  # where a gather puts the parts of all ranks, end to end
        self._work: Work | None = None  # a gather under way
        self._mark = places.gathers.record_event()  # the end of the last gather
        self._nbytes = self.full.untyped_storage().nbytes()
        self.release()

    def prepare(self) -> None:
        self.places.gathers.wait_for_current()
        self._part.prepare()

    def gather(self, ahead: bool = False) -> None:
        stream = self.places.gathers
        with stream.as_current():
            storage = self.full.untyped_storage()
            if storage.nbytes() != self._nbytes:
                storage.resize_(self._nbytes)
            self._by_rank = torch.empty_like(self.full) if self.rows else self.full
            self._work = self.places.gather_group.all_gather(
                self._by_rank.split(self.cut.splits),
                self._part.sent(),
                async_op=ahead and not stream.queued,
                label=self.label,
            )
            if self._work is None:
                self._put()
        self._mark = stream.record_event()

    def arrive(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
            self._put()
        self._mark.wait()

    def _put(self) -> None:
        """Bring what came to its place."""
        if self.rows:
            torch._foreach_copy_(*self._scattered(self.full, self._by_rank))
        self._by_rank = self.full

    def release(self) -> None:
        self.places.gathers.wait_for_current()
        self.full.untyped_storage().resize_(0)

    @property
    def whole_nbytes(self) -> int:
        return self.full.untyped_storage().nbytes()


@final
class ReplicatedStorage(Storage):
    """Everything on every rank: small units, and ``NO_SHARD``."""

    sharded = False
    _part: LocalShard

    def _allocate(self) -> None:
        self.own = tuple(cut_flat(self.cut.shapes, 1).pieces[0])
        self.own_numel = self.cut.numel
        numel, compute = self.cut.numel, self.compute_dtype
        self._part = make_masters(numel, self.dtype, compute, self.places)
        self.part = self._whole = self._part.masters
        if self.recasts:
            self._whole = torch.empty(numel, dtype=compute, device=self.places.device)
        self.locals = self.whole_views(self._part.masters)
        self.wholes = self.whole_views(self._whole)

    def prepare(self) -> None:
        if self._whole is self._part.masters:
            return
        stream = self.places.gathers
        stream.wait_for_current()
        self._part.prepare()
        with stream.as_current():
            self._whole.copy_(self._part.staged, non_blocking=True)
        stream.record_event().wait()

    def gather(self, ahead: bool = False) -> None:
        pass  # always there

    def arrive(self) -> None:
        pass  # always there

    def release(self) -> None:
        pass  # always there

    @property
    def whole_nbytes(self) -> int:
        return 0 if self._whole is self._part.masters else self._whole.nbytes


def make_storage(
    members: Sequence[Member],
    places: ShardDevices,
    layout: Layout,
    dtype: torch.dtype,
    compute: torch.dtype,
    label: str,
    *,
    sharded: bool,
) -> Storage:
    """Memory for ``members``, without values: ``settle`` takes each parameter in."""
    numels = [member.param.numel() for member in members]
    order = place_order(numels, dtype.itemsize)
    placed = [members[i] for i in order]
    shapes = [tuple(member.param.shape) for member in placed]
    rows = layout == "rows"
    cut = (cut_rows if rows else cut_flat)(shapes, places.group.size)
    # Shared memory of the device is always there, so what is to leave it cannot be in that.
    shared = places.group.shares_memory and places.offload is not Offload.ALL
    kind = ReplicatedStorage if not sharded else SharedStorage if shared else GatheredStorage
    return kind(placed, cut, places, dtype, compute, label, rows=rows and sharded)


def copy_storage(storage: Storage, members: Sequence[Member]) -> Storage:
    """Memory of its own for copies of the members of ``storage``, cut in the same way.

    All ranks call it where memory is shared. The copies hold this rank's parts; nothing is sent.
    """
    for member in members:
        member.param.requires_grad_(storage.requires_grad)
    clone = type(storage)(
        members,
        storage.cut,
        storage.places,
        storage.dtype,
        storage.compute_dtype,
        storage.label,
        rows=storage.rows,
    )
    with torch.no_grad():
        for param, part, value in zip(clone.params, clone.locals, storage.locals, strict=True):
            part.copy_(value)
            param.data = part
    return clone
