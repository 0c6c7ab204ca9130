"""The memory of one group of parameters of a unit: own parts, whole parameters, gradient shards.

All shards of a storage have one dtype; its parameters compute in one dtype, and all need a gradient
or none does.
``locals`` are this rank's parts, which the optimizer sees; ``wholes`` are what forward sees. The
kinds of storage are in ``storages``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from echelon.fsdp.local_shard import LocalShard
from echelon.fsdp.shard_devices import ShardDevices
from echelon.fsdp.shard_layout import ShardLayout, numel_of
from echelon.fsdp.units import Member


class Storage(ABC):
    """What the three kinds share. Abstract: a kind says where its memory lies.

    Attributes:
        members: the parameters, in the order of the buffer.
        params: the parameter objects.
        cut: who owns what.
        sharded: whether ranks own different parts.
        moves: whether a gather communicates.
        shares_wholes: whether all ranks see one and the same ``wholes``.
        rows: whether parts are whole rows.
        requires_grad: of all parameters.
        places: where its memory lies.
        group: the ranks that share it.
        dtype: of the own parts.
        compute_dtype: in forward and backward.
        locals: this rank's part of each parameter: 1D by element, or whole rows.
        wholes: each parameter in its own shape.
        part: this rank's parts end to end, 1D; None where they do not lie so.
        exposed: what optimizers see: the parameters, or one that is all of this rank's part.
        label: what errors and events call it.
    """

    sharded = True
    moves = shares_wholes = False
    _part: LocalShard | None = (
        None  # none where own parts are views of a whole buffer that all share
    )

    def __init__(
        self,
        members: Sequence[Member],
        cut: ShardLayout,
        places: ShardDevices,
        dtype: torch.dtype,
        compute: torch.dtype,
        label: str,
        *,
        rows: bool,
    ) -> None:
        self.members = tuple(members)
        self.params: list[nn.Parameter] = [member.param for member in members]
        self.places, self.group = places, places.group
        self.cut, self.label, self.rows = cut, label, rows
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

    def keep(self) -> None:
        """Take over what was written into the whole parameters that are shown."""
        self.adopt([param.data for param in self.params])

    def isolated(self) -> list[Tensor]:
        """Whole parameters that no other rank sees, with the values of ``wholes``."""
        if not self.shares_wholes:
            return self.wholes
        copy = torch.empty(self.cut.numel, dtype=self.compute_dtype, device=self.places.device)
        views = self.whole_views(copy)
        torch._foreach_copy_(views, self.wholes)
        return views

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

        All ranks call it; where nothing is sharded, it copies. Dtype and device are those of
        ``part``.
        """
        if not self.sharded:
            return part.detach().clone()
        mine = self.places.on_device(part.detach())
        whole = mine.new_empty(self.cut.shapes[i])
        # Both layouts give the ranks consecutive pieces of one parameter, in rank order.
        lengths = [pieces[i].numel for pieces in self.cut.pieces]
        self.group.all_gather(whole.view(-1).split(lengths), mine, label=label)
        return whole.to(part.device)

    def settle(self, i: int) -> None:
        """Take this rank's part of a whole parameter, which becomes that part.

        Nothing else here refers to its old memory, so that is free.
        """
        param = self.params[i]
        with torch.no_grad():
            self.adopt_one(i, param)
            # Of a gradient from before wrapping the rank keeps its part, too.
            gradient = None if param.grad is None else self.part_of(i, param.grad)
            param.grad = None
            param.data = self.locals[i]
            if gradient is not None:
                param.grad = gradient.to(param, copy=True)

    def replaced(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Parameters, shown as parts, that somebody has given other memory: name, object, part."""
        names = [member.name for member in self.members]
        known = [*zip(names, self.params, self.locals, strict=True)]
        if self.is_flat:
            assert self.part is not None
            known.append((f"flat parameter of {self.label}", self.exposed[0], self.part))
        with torch._C.DisableTorchFunction():
            return [
                (name, param, part)
                for name, param, part in known
                if param.data_ptr() != part.data_ptr() and (part.numel() or param.numel())
            ]

    def flatten(self) -> None:
        """Expose one parameter, 1D, in the place of all."""
        assert self.part is not None, "refused before anything was built"
        self.exposed = [nn.Parameter(self.part, requires_grad=self.requires_grad)]
        gradients = [param.grad for param in self.params]
        if any(gradient is not None for gradient in gradients):
            flat = torch.zeros_like(self.part)
            for piece, gradient in zip(
                flat.split([piece.numel for piece in self.own]), gradients, strict=True
            ):
                if gradient is not None:
                    piece.copy_(gradient.view(-1))
            self.exposed[0].grad = flat
        for param in self.params:
            param.grad = None

    @property
    def is_flat(self) -> bool:
        """Whether optimizers see one flat parameter."""
        return self.exposed is not self.params

    @property
    def recasts(self) -> bool:
        """Whether whole parameters are never the parts themselves: other dtype, other memory."""
        return self.places.offloads or self.dtype != self.compute_dtype

    def holds(self, address: int) -> bool:
        """Whether ``address`` lies in the memory of ``wholes``."""
        for start, whole in zip(self.cut.starts, self.wholes, strict=True):
            if whole.numel():
                itemsize = whole.element_size()
                first = whole.data_ptr() - start * itemsize
                return first <= address < first + self.cut.numel * itemsize
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's parts on the device."""
        return self.own_numel * self.dtype.itemsize if self._part is None else self._part.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of this rank's parts on the host, where that is another memory."""
        return 0 if self._part is None else self._part.host_nbytes

    @property
    @abstractmethod
    def whole_nbytes(self) -> int:
        """Bytes of ``wholes`` now, beyond the own parts; this rank's share of shared memory."""

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


def await_readers(storages: Iterable[Storage]) -> None:
    """Return when no gather reads the own parts any more, so that they may be written."""
    for places in {storage.places for storage in storages}:
        places.rest()


def prepare(storages: Sequence[Storage]) -> None:
    """Make the own parts ready for the others, as they are now. All ranks meet after that."""
    await_readers(storages)  # once: each storage writes what gathers read
    with torch.no_grad():
        for storage in storages:
            storage.prepare()


def shaped_part(flat: Tensor, shape: tuple[int, ...], rows: bool) -> Tensor:
    """A part as users see it: whole rows where a unit is cut by rows, else 1D."""
    if not rows or not shape:
        return flat
    row = numel_of(shape[1:])
    return flat.view(flat.numel() // row if row else 0, *shape[1:])
