"""The memory of one group of parameters of a unit: own parts, whole parameters, gradient shards.

All shards of a storage have one dtype; its parameters compute in one dtype, and all need a gradient
or none does.
``locals`` are this rank's parts, which the optimizer sees; ``wholes`` are what forward sees:

- ``Shared``: the whole buffer is one piece of memory that all ranks see. Where the compute dtype is
  the shards' own, the parts are views of it: an optimizer step is a gather, and nothing is copied.
- ``Gathered``: every rank has its parts, and a buffer that collectives fill and release empties.
- ``Replicated``: every rank has everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.fsdp.cuts import Cut, cut_flat, cut_rows, numel_of, place_order
from echelon.fsdp.policy import Layout
from echelon.fsdp.ranks import Ranks
from echelon.fsdp.units import Member
from echelon.world.work import Work

__all__ = ["Gathered", "Replicated", "Shared", "Storage", "copy_storage", "make_storage"]


class Storage(ABC):
    """What the three kinds share.

    Attributes:
        members: the parameters, in the order of the buffer.
        params: the parameter objects.
        cut: who owns what.
        sharded: whether ranks own different parts.
        moves: whether a gather communicates.
        rows: whether parts are whole rows.
        requires_grad: of all parameters.
        dtype: of the own parts.
        compute_dtype: in forward and backward.
        locals: this rank's part of each parameter: 1D by element, or whole rows.
        wholes: each parameter in its own shape.
        part: this rank's parts end to end, 1D; None where they do not lie so.
        exposed: what optimizers see: the parameters, or one that is all of this rank's part.
        label: what errors and events call it.
    """

    sharded = True
    moves = False

    def __init__(
        self,
        members: Sequence[Member],
        cut: Cut,
        ranks: Ranks,
        dtype: torch.dtype,
        compute: torch.dtype,
        label: str,
        *,
        rows: bool,
    ) -> None:
        self.members = tuple(members)
        self.params: list[nn.Parameter] = [member.param for member in members]
        self.cut, self.label, self.rows = cut, label, rows
        self.ranks, self.group = ranks, ranks.shard
        self.dtype, self.compute_dtype = dtype, compute
        self.requires_grad = self.params[0].requires_grad
        self.own = cut.pieces[self.group.rank]
        self.own_numel = sum(piece.numel for piece in self.own)
        self.locals: list[Tensor] = []
        self.wholes: list[Tensor] = []
        self.part: Tensor | None = None
        self._allocate()
        self.exposed = self.params

    @abstractmethod
    def _allocate(self) -> None:
        """Make ``locals``, ``wholes`` and ``part``."""

    @abstractmethod
    def prepare(self) -> None:
        """The own parts may have changed: make them ready for the others."""

    @abstractmethod
    def gather(self, ahead: bool = False) -> None:
        """Begin to make ``wholes`` valid; with ``ahead`` others go on meanwhile."""

    @abstractmethod
    def arrive(self) -> None:
        """Return when ``wholes`` are valid, after ``gather``."""

    @abstractmethod
    def release(self) -> None:
        """Give the memory of ``wholes`` back, if it is this rank's alone."""

    @abstractmethod
    def keep(self) -> None:
        """Take over what was written into ``wholes``."""

    def adopt(self, values: Sequence[Tensor]) -> None:
        """Take this rank's parts of whole parameters."""
        for i, value in enumerate(values):
            self.adopt_one(i, value)

    def adopt_one(self, i: int, value: Tensor) -> None:
        """Take this rank's part of one whole parameter."""
        self.locals[i].copy_(self.part_of(i, value))

    def part_of(self, i: int, value: Tensor) -> Tensor:
        """This rank's part of a whole tensor that is like parameter ``i``; a view if it can be."""
        piece = self.own[i]
        flat = value.detach().reshape(-1)[piece.start : piece.start + piece.numel]
        return flat.view(self.locals[i].shape)

    def assembled(self, i: int, part: Tensor, *, label: str) -> Tensor:
        """The whole tensor of which every rank has a part like that of parameter ``i``.

        All ranks call it; where nothing is sharded, it copies. The dtype is that of ``part``.
        """
        if not self.sharded:
            return part.detach().clone()
        whole = part.new_empty(self.cut.shapes[i], requires_grad=False)
        # Both layouts give the ranks consecutive pieces of one parameter, in rank order.
        lengths = [pieces[i].numel for pieces in self.cut.pieces]
        self.group.all_gather(whole.view(-1).split(lengths), part.detach(), label=label)
        return whole

    def settle(self, i: int) -> None:
        """Take this rank's part of a whole parameter, which becomes that part.

        Nothing else here refers to its old memory, so that is free.
        """
        with torch.no_grad():
            self.adopt_one(i, self.params[i])
        self.params[i].data = self.locals[i]

    def flatten(self) -> None:
        """Expose one parameter, 1D, in the place of all."""
        assert self.part is not None, "refused before anything was built"
        self.exposed = [nn.Parameter(self.part, requires_grad=self.requires_grad)]

    @property
    def is_flat(self) -> bool:
        """Whether optimizers see one flat parameter."""
        return self.exposed is not self.params

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's parts."""
        return self.own_numel * self.dtype.itemsize

    @property
    def whole_nbytes(self) -> int:
        """Bytes of ``wholes`` now, beyond the own parts; this rank's share of shared memory."""
        return 0

    def _scattered(self, full: Tensor, by_rank: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Places in the whole buffer, and the pieces of all ranks that belong there."""
        places, pieces, end = [], [], 0
        for own in self.cut.pieces:
            for piece in own:
                start = self.cut.starts[piece.member] + piece.start
                places.append(full[start : start + piece.numel])
                pieces.append(by_rank[end : end + piece.numel])
                end += piece.numel
        return places, pieces

    def _cut_out(self, flat: Tensor, *, offsets: Sequence[int]) -> list[Tensor]:
        """This rank's pieces, at ``offsets`` of ``flat``, in the shape that users see."""
        return [
            shaped_part(flat[at : at + piece.numel], self.cut.shapes[piece.member], self.rows)
            for at, piece in zip(offsets, self.own, strict=True)
        ]

    def whole_views(self, flat: Tensor) -> list[Tensor]:
        """Each parameter in its own shape, where it lies in a whole buffer."""
        return [
            flat[start : start + numel_of(shape)].view(shape)
            for start, shape in zip(self.cut.starts, self.cut.shapes, strict=True)
        ]

    def _packed_offsets(self) -> list[int]:
        """Where the own pieces begin when they lie end to end."""
        offsets, end = [], 0
        for piece in self.own:
            offsets.append(end)
            end += piece.numel
        return offsets


@final
class Shared(Storage):
    """One whole buffer for all ranks of the group, who share memory."""

    def _allocate(self) -> None:
        self.full = self.group.shared_tensor(self.cut.numel, self.compute_dtype)
        self.wholes = self.whole_views(self.full)
        in_full = [self.cut.starts[piece.member] + piece.start for piece in self.own]
        self._targets: list[Tensor] = []
        if self.compute_dtype == self.dtype:
            self.locals = self._cut_out(self.full, offsets=in_full)
            if not self.rows:
                first = sum(self.cut.splits[: self.group.rank])
                self.part = self.full[first : first + self.own_numel]
        else:
            self.part = self.shard = torch.empty(self.own_numel, dtype=self.dtype)
            self.locals = self._cut_out(self.shard, offsets=self._packed_offsets())
            self._targets = self._cut_out(self.full, offsets=in_full)

    def prepare(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self.locals)

    def gather(self, ahead: bool = False) -> None:
        pass  # valid since all ranks have prepared

    def arrive(self) -> None:
        pass  # so is it now

    def release(self) -> None:
        pass  # it is everyone's

    def keep(self) -> None:
        if self._targets:
            torch._foreach_copy_(self.locals, self._targets)

    @property
    def whole_nbytes(self) -> int:
        return self.own_numel * self.compute_dtype.itemsize if self._targets else 0


@final
class Gathered(Storage):
    """Own parts in one buffer, and a whole buffer that exists between gather and release."""

    moves = True

    def _allocate(self) -> None:
        device = self.group.device
        self.part = self.shard = torch.empty(self.own_numel, dtype=self.dtype, device=device)
        self.locals = self._cut_out(self.shard, offsets=self._packed_offsets())
        self.full = torch.empty(self.cut.numel, dtype=self.compute_dtype, device=device)
        self.wholes = self.whole_views(self.full)
        self._by_rank = self.full  # where a gather puts the parts of all ranks, end to end
        self._work: Work | None = None  # a gather under way
        self._nbytes = self.full.untyped_storage().nbytes()
        self.release()

    def prepare(self) -> None:
        pass  # every gather takes the parts as they are

    def gather(self, ahead: bool = False) -> None:
        storage = self.full.untyped_storage()
        if storage.nbytes() != self._nbytes:
            storage.resize_(self._nbytes)
        self._by_rank = torch.empty_like(self.full) if self.rows else self.full
        parts, shard = self._by_rank.split(self.cut.splits), self.shard.to(self.compute_dtype)
        self._work = self.ranks.gathers.all_gather(parts, shard, async_op=ahead, label=self.label)

    def arrive(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        if self.rows:
            torch._foreach_copy_(*self._scattered(self.full, self._by_rank))
        self._by_rank = self.full

    def release(self) -> None:
        self.full.untyped_storage().resize_(0)

    def keep(self) -> None:
        self.adopt(self.wholes)

    @property
    def whole_nbytes(self) -> int:
        return self.full.untyped_storage().nbytes()


@final
class Replicated(Storage):
    """Everything on every rank: small units, and ``NO_SHARD``."""

    sharded = False

    def _allocate(self) -> None:
        self.own = tuple(cut_flat(self.cut.shapes, 1).pieces[0])
        self.own_numel = self.cut.numel
        self.part = flat = torch.empty(self.cut.numel, dtype=self.dtype, device=self.group.device)
        self.locals = self.whole_views(flat)
        self.wholes = self.locals
        if self.compute_dtype != self.dtype:
            self.wholes = self.whole_views(flat.to(self.compute_dtype))

    def prepare(self) -> None:
        if self.wholes is not self.locals:
            torch._foreach_copy_(self.wholes, self.locals)

    def gather(self, ahead: bool = False) -> None:
        pass  # always there

    def arrive(self) -> None:
        pass  # always there

    def release(self) -> None:
        pass  # always there

    def keep(self) -> None:
        if self.wholes is not self.locals:
            torch._foreach_copy_(self.locals, self.wholes)


def make_storage(
    members: Sequence[Member],
    ranks: Ranks,
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
    cut = (cut_rows if rows else cut_flat)(shapes, ranks.shard.size)
    kind = Replicated if not sharded else Shared if ranks.shard.shares_memory else Gathered
    return kind(placed, cut, ranks, dtype, compute, label, rows=rows and sharded)


def copy_storage(storage: Storage, members: Sequence[Member]) -> Storage:
    """Memory of its own for copies of the members of ``storage``, cut in the same way.

    All ranks call it where memory is shared. The copies hold this rank's parts; nothing is sent.
    """
    for member in members:
        member.param.requires_grad_(storage.requires_grad)
    clone = type(storage)(
        members,
        storage.cut,
        storage.ranks,
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


def shaped_part(flat: Tensor, shape: tuple[int, ...], rows: bool) -> Tensor:
    """A part as users see it: whole rows where a unit is cut by rows, else 1D."""
    if not rows or not shape:
        return flat
    row = numel_of(shape[1:])
    return flat.view(flat.numel() // row if row else 0, *shape[1:])
