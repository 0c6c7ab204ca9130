"""The memory of one group of parameters of a unit: this rank's shards, and unsharded parameters.

All shards of a storage have one dtype, all its parameters compute in one dtype, and all need a
gradient or none does. The optimizer sees ``shards``, and forward sees ``unsharded``.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from echelon.errors import StateError
from echelon.fsdp.local_shard import LocalShard, ShardDevices
from echelon.fsdp.shard_layout import RowPiece, ShardLayout
from echelon.fsdp.storage_shardings import flat_sharding, shardings_of, whole_shardings
from echelon.fsdp.units import Member
from echelon.modules.sharded_tensor import (
    ShardedParameter,
    Sharding,
    forget,
    mark,
    show_as_part,
    unmarked,
)
from echelon.state.tensor_shard import range_like


class Storage(ABC):
    """The base of the kinds of storage, which differ in where memory lies and how it is filled.

    Attributes:
        members: the parameters with their names, in the order of the buffer.
        params: the parameter objects.
        layout: says which rank has which elements.
        splits: the number of elements that each rank sends; None: all send ``part_numel``.
        part_numel: the number of elements that this rank sends, its shard and padding.
        is_sent_packed: whether what it sends begins with its shards end to end, all padding behind.
        local_ranges: this rank's range of each parameter.
        sharded: whether the ranks have different shards.
        communicates: whether an unshard communicates.
        shares_unsharded: whether all ranks see the same memory as ``unsharded``.
        rows: whether shards are whole rows of dim 0.
        requires_grad: whether the parameters need gradients.
        devices: the memories and streams of this rank.
        group: the ranks that share the parameters.
        dtype: the dtype of the shards.
        compute_dtype: the dtype in forward and backward.
        shards: this rank's shard of each parameter, 1D or whole rows.
        unsharded: each parameter in its own shape.
        flat_shard: this rank's shards end to end, 1D; None where they are not contiguous.
        optimizer_params: what optimizers see: the parameters, or one flat parameter.
        label: the name in errors and events.
        on_write: called before users write into shards, which other ranks may read.
        classes: of which class each parameter is while it is unsharded.
        shows_parts: whether sharded parameters and their gradients say that they are parts.
        shardings: of each parameter, which part this rank has; empty without ``shows_parts``.
        is_filling: whether ``unsharded`` or what it is made of is being written by this rank.
    """

    sharded = True
    communicates = shares_unsharded = is_filling = False
    _local: LocalShard | None = None  # None where shards are views of a buffer that all ranks share

    def __init__(
        self,
        members: Sequence[Member],
        layout: ShardLayout,
        devices: ShardDevices,
        dtype: torch.dtype,
        compute: torch.dtype,
        label: str,
        *,
        rows: bool,
    ) -> None:
        self.members = tuple(members)
        self.params: list[nn.Parameter] = [member.param for member in members]
        self.devices, self.group = devices, devices.group
        self.layout, self.label, self.rows = layout, label, rows
        self.dtype, self.compute_dtype = dtype, compute
        self.requires_grad = self.params[0].requires_grad
        self.local_ranges = layout.ranges_of(self.group.rank)
        self.shard_numel = sum(span.numel for span in self.local_ranges)
        padded = layout.part_numel
        self.splits = layout.numels_by_rank if padded is None else None
        self.part_numel = self.shard_numel if padded is None else padded
        # Where this rank's shards begin in a buffer of them alone, and in a part with padding.
        self._packed_offsets = [0, *accumulate(span.numel for span in self.local_ranges)][:-1]
        self._sent_offsets = layout.places if rows else self._packed_offsets
        offsets = zip(self._packed_offsets, self._sent_offsets, self.local_ranges, strict=True)
        self.is_sent_packed = padded is None or all(
            packed == sent for packed, sent, span in offsets if span.numel
        )
        self.shards: list[Tensor] = []
        self.unsharded: list[Tensor] = []
        self.flat_shard: Tensor | None = None
        self.optimizer_params = self.params
        self._flat_trains = self.requires_grad
        self.on_write: Callable[[], None] = lambda: None
        # A parameter may be of a subclass of nn.Parameter, which it is again while unsharded.
        self.classes = [
            nn.Parameter if type(param) is ShardedParameter else type(param)
            for param in self.params
        ]
        self._allocate()
        self.shows_parts = self.sharded and self.group.size > 1
        self.shardings = shardings_of(self) if self.shows_parts else []

    @cached_property
    def row_pieces(self) -> list[list[RowPiece]]:
        """By rows, of each parameter, where its rows are in the parts of all ranks."""
        return self.layout.pieces()

    @abstractmethod
    def _allocate(self) -> None:
        """Set ``shards``, ``unsharded`` and ``flat_shard``; the last step of the constructor."""

    @abstractmethod
    def refresh(self) -> None:
        """Make the shards, which may have changed, ready for the next unshard.

        The unshard stream waits for what has changed them.
        """

    @abstractmethod
    def unshard(self, *, async_op: bool = False) -> None:
        """Begin to make ``unsharded`` valid; with ``async_op`` return before it is."""

    @abstractmethod
    def wait_for_unshard(self) -> None:
        """Return when ``unsharded`` is valid, after ``unshard``."""

    @abstractmethod
    def reshard(self) -> None:
        """Free the memory of ``unsharded``, if it belongs to this rank alone."""

    @property
    @abstractmethod
    def unsharded_nbytes(self) -> int:
        """The bytes of ``unsharded`` beyond the shards; of shared memory, this rank's share."""

    # What users see --------------------------------------------------------------------------

    def mark_gradients(self, views: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of ``optimizer_params``, which say that they are parts if they are."""
        if not self.shows_parts:
            return list(views)
        return list(map(mark, views, self._gradient_shardings()))

    def _gradient_shardings(self) -> list[Sharding]:
        """Of each gradient of ``optimizer_params``, which part this rank has."""
        if not self.shows_parts:
            wholes = whole_shardings(self)
            return [wholes[0].flattened((self.shard_numel,))] if self.is_flat else wholes
        shardings = [flat_sharding(self)] if self.is_flat else self.shardings
        return [sharding.fresh() for sharding in shardings]

    def without_values(self, dtype: torch.dtype) -> list[tuple[Tensor, Sharding]]:
        """For each gradient of ``optimizer_params``, one that is not a number, and its part."""
        shapes = [(self.shard_numel,)] if self.is_flat else [shard.shape for shard in self.shards]
        nan = torch.full((), math.nan, dtype=dtype, device=self.optimizer_params[0].device)
        pairs = zip(shapes, self._gradient_shardings(), strict=True)
        return [(nan.expand(shape), sharding) for shape, sharding in pairs]

    def show_parts(self) -> None:
        """Let the parameters, which have the memory of the shards, say that they are parts."""
        for param, sharding in zip(self.params, self.shardings, strict=False):
            show_as_part(param, sharding)

    def show_whole(self) -> None:
        """Let the parameters be whole ones for good; they still have the memory of the shards."""
        for param, cls in zip(self.params, self.classes, strict=True):
            if self.shows_parts:
                param.__class__ = cls
                forget(param)

    # Values of parameters --------------------------------------------------------------------

    def private_copies(self) -> list[Tensor]:
        """Unsharded parameters that no other rank sees, with the values of ``unsharded``."""
        if not self.shares_unsharded:
            return self.unsharded
        memory = torch.empty(
            self.layout.numel, dtype=self.compute_dtype, device=self.devices.device
        )
        views = self.views_in(memory)
        torch._foreach_copy_(views, self.unsharded)
        return views

    def write_back(self) -> None:
        """Copy what was written into the unsharded parameters to this rank's shards."""
        for i, param in enumerate(self.params):
            self.copy_to_shard(i, param.data)

    def copy_to_shard(self, i: int, value: Tensor) -> None:
        """Copy this rank's part of an unsharded parameter to its shard."""
        self.shards[i].copy_(self.local_shard_of(i, value))

    def local_shard_of(self, i: int, value: Tensor) -> Tensor:
        """This rank's shard of a tensor with the shape of parameter ``i``; a view if possible."""
        return range_like(self.shards[i], value, self.local_ranges[i].start)

    def gather_tensor(self, i: int, shard: Tensor, *, label: str) -> Tensor:
        """All-gather a tensor that is sharded like parameter ``i``, from ``shard`` of every rank.

        All ranks call it. Where nothing is sharded it copies. The result is on the device of
        ``shard``.
        """
        if not self.sharded:
            return shard.detach().clone()
        sent = self.devices.to_device(shard.detach())
        gathered = sent.new_empty(self.layout.shapes[i])
        # Both layouts give the ranks consecutive ranges of a parameter, in rank order.
        lengths = [span.numel for span in self.layout.ranges_by_rank(i)]
        self.group.all_gather(gathered.view(-1).split(lengths), sent, label=label)
        return gathered.to(shard.device)

    def gather_gradients(self) -> list[Tensor | None]:
        """All-gather the gradient of each parameter; None if it has none. All ranks call it."""
        shards: list[Tensor | None] = [
            None if param.grad is None else unmarked(param.grad) for param in self.optimizer_params
        ]
        if self.is_flat:
            flat = shards[0]
            shards = [None] * len(self.params) if flat is None else [*self.split_by_param(flat)]
        with torch.no_grad():
            return [
                None
                if shard is None
                else self.gather_tensor(i, shard, label=f"gradient of {member.name}").view(
                    self.layout.shapes[i]
                )
                for i, (shard, member) in enumerate(zip(shards, self.members, strict=True))
            ]

    def replace_param_by_shard(self, i: int) -> None:
        """Give parameter ``i``, which is unsharded, the memory of this rank's shard.

        Nothing else here refers to its old memory, so that is freed.
        """
        param = self.params[i]
        with torch.no_grad():
            self.copy_to_shard(i, param)
            # A gradient from before wrapping is sharded, too.
            gradient = None if param.grad is None else self.local_shard_of(i, param.grad)
            param.grad = None
            param.data = self.shards[i]
            if gradient is not None:
                gradient = gradient.to(param, copy=True)
                sharding = self.shardings[i] if self.shows_parts else None
                param.grad = gradient if sharding is None else mark(gradient, sharding.fresh())
            if self.shows_parts:
                show_as_part(param, self.shardings[i])

    def take_replaced(self) -> bool:
        """Keep values that users set by ``param.data = value``; whether memory has changed.

        They are copied into shards. A replicated parameter keeps the memory that the user gave it,
        who may have kept the old one. Raises StateError if a value has another shape.
        """
        has_changed = False
        for name, param, shard in self._replaced():
            with torch.no_grad(), DisableTorchFunctionSubclass():
                if param.shape != shard.shape:
                    raise StateError(
                        f"parameter {name!r} was given a value of {list(param.shape)}, and this "
                        f"rank's shard is {list(shard.shape)}: give whole values inside `with "
                        "model.full_parameters(writeback=True):`, which all ranks enter, or to "
                        "load_state_dict()"
                    )
                if self.sharded or self.is_recast or self.is_flat:
                    self.devices.wait_for_unshards()
                    shard.copy_(param.data)
                    param.data = shard
                else:
                    i = next(i for i, other in enumerate(self.params) if other is param)
                    self.shards[i] = self.unsharded[i] = param.data
                    has_changed = True
        return has_changed

    def _replaced(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """The sharded parameters that have other memory than their shards: name, object, shard."""
        shown, kept = self.params, self.shards
        if self.is_flat:
            assert self.flat_shard is not None
            shown, kept = [*shown, self.optimizer_params[0]], [*kept, self.flat_shard]
        with torch._C.DisableTorchFunction():
            now, expected = [*map(Tensor.data_ptr, shown)], [*map(Tensor.data_ptr, kept)]
            if now == expected:  # nearly always, so this loop stays in C
                return []
            names = [*(member.name for member in self.members), f"flat parameter of {self.label}"]
            moved = map(operator.ne, now, expected)
            return [
                (name, param, shard)
                for has_moved, name, param, shard in zip(moved, names, shown, kept, strict=False)
                if has_moved and (shard.numel() or param.numel())
            ]

    # One flat parameter ----------------------------------------------------------------------

    def use_flat_parameter(self) -> None:
        """Show optimizers one flat parameter in the place of all."""
        assert self.flat_shard is not None, "FSDP refuses options that need it before this"
        flat = nn.Parameter(self.flat_shard, requires_grad=self.requires_grad)
        gradients = [None if p.grad is None else unmarked(p.grad) for p in self.params]
        self.optimizer_params = [flat]
        if any(gradient is not None for gradient in gradients):
            flat.grad = torch.zeros_like(self.flat_shard)
            for view, gradient in zip(self.split_by_param(flat.grad), gradients, strict=True):
                if gradient is not None:
                    view.copy_(gradient.view(-1))
            (flat.grad,) = self.mark_gradients([flat.grad])
        for param in self.params:
            param.grad = None
        if self.shows_parts:
            show_as_part(flat, flat_sharding(self))

    def follow_flat_parameter(self) -> None:
        """Freeze or unfreeze the parameters if users have done so with the flat one that they see.

        Raises StateError if some of them are frozen, which an optimizer of the flat one changes.
        """
        trains = self.optimizer_params[0].requires_grad
        if not self.is_flat:
            return
        if trains is not self._flat_trains:
            self._flat_trains = trains
            for param in self.params:
                param.requires_grad_(trains)
        frozen = [member.name for member in self.members if not member.param.requires_grad]
        if 0 < len(frozen) < len(self.members):
            raise StateError(
                f"parameter {frozen[0]!r} was frozen, and is in a flat parameter with others that "
                "are trained, so that weight decay and moments of its optimizer would change it: "
                "freeze it before FSDP wraps the model, which gives frozen parameters a flat one "
                "of their own, or wrap with use_orig_params=True"
            )

    @property
    def is_flat(self) -> bool:
        """Whether optimizers see a flat parameter."""
        return self.optimizer_params is not self.params

    def split_by_param(self, flat: Tensor) -> list[Tensor]:
        """Split a tensor that is like ``flat_shard`` into 1D tensors that are like the shards."""
        return list(flat.split([span.numel for span in self.local_ranges]))

    # Facts -----------------------------------------------------------------------------------

    @property
    def is_recast(self) -> bool:
        """Whether unsharded parameters have another dtype than the shards, or another device."""
        return self.devices.offloads or self.dtype != self.compute_dtype

    @property
    def loses_writes(self) -> bool:
        """Whether what a forward writes into ``unsharded`` is lost, or is what other ranks read."""
        is_shared = self.sharded and self.group.size > 1
        return bool(self.layout.numel) and (self.is_recast or self.communicates or is_shared)

    def contains(self, address: int) -> bool:
        """Whether an address lies in the memory of ``unsharded``."""
        for start, param in zip(self.layout.starts, self.unsharded, strict=True):
            if param.numel():
                itemsize = param.element_size()
                first = param.data_ptr() - start * itemsize
                return first <= address < first + self.layout.numel * itemsize
        return False

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's shards on the device."""
        return self.shard_numel * self.dtype.itemsize if self._local is None else self._local.nbytes

    @property
    def host_nbytes(self) -> int:
        """The bytes of this rank's shards on the host, where that is another memory."""
        return 0 if self._local is None else self._local.host_nbytes

    # Views of buffers ------------------------------------------------------------------------

    def views_in(self, buffer: Tensor) -> list[Tensor]:
        """Views of an unsharded buffer as its parameters, each in its own shape."""
        return [
            buffer[start : start + math.prod(shape)].view(shape)
            for start, shape in zip(self.layout.starts, self.layout.shapes, strict=True)
        ]

    def _local_shard_views(self, buffer: Tensor, offsets: Sequence[int]) -> list[Tensor]:
        """Views of a buffer as this rank's shards, which begin at ``offsets``."""
        return [
            self._view_as_shard(buffer[offset : offset + span.numel], span.member)
            for offset, span in zip(offsets, self.local_ranges, strict=True)
        ]

    def _view_as_shard(self, flat: Tensor, i: int) -> Tensor:
        shape = self.layout.shapes[i]
        if self.group.size == 1:  # a rank alone has the whole, and nothing says that it is a part
            return flat.view(shape)
        return view_as_rows(flat, shape) if self.rows else flat

    def without_padding(self, part: Tensor) -> Tensor:
        """This rank's shards end to end, of a part with padding; a view if possible."""
        if self.is_sent_packed:
            return part[: self.shard_numel] if part.numel() != self.shard_numel else part
        shards = self._local_shard_views(part, self._sent_offsets)
        return torch.cat([shard.view(-1) for shard in shards])


def wait_for_unshards(storages: Iterable[Storage]) -> None:
    """Return when no unshard of this rank reads its shards any more."""
    for devices in {storage.devices for storage in storages}:
        devices.wait_for_unshards()


def refresh(storages: Sequence[Storage]) -> None:
    """Make the current shards ready for all ranks, which meet after that."""
    wait_for_unshards(storages)  # which read what ``refresh`` writes
    for devices in {storage.devices for storage in storages}:
        # The unshard stream waits for the optimizer step; otherwise it would send old shards.
        devices.unshard_stream.wait_for_current()
    with torch.no_grad():
        for storage in storages:
            storage.is_filling = True
            storage.refresh()
            storage.is_filling = False


def view_as_rows(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The elements of whole rows of a tensor of this shape, viewed as these rows."""
    if not shape:
        return flat
    row_numel = math.prod(shape[1:])
    return flat.view(flat.numel() // row_numel if row_numel else 0, *shape[1:])
