"""The memory of one group of parameters of a unit: this rank's shards, and unsharded parameters.

All shards of a storage have one dtype; its parameters compute in one dtype, and all need a gradient
or none does. ``shards`` are what the optimizer sees, ``unsharded`` is what forward sees. The kinds
of storage are in ``storages``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from echelon.errors import StateError
from echelon.fsdp.local_shard import LocalShard, ShardDevices
from echelon.fsdp.shard_layout import ShardLayout, numel_of
from echelon.fsdp.units import Member
from echelon.modules.sharded_gradients import unmarked


class Storage(ABC):
    """What all kinds share. Abstract: a kind says where its memory lies and how it is filled.

    Attributes:
        members: the parameters, in the order of the buffer.
        params: the parameter objects.
        layout: which rank has what.
        numels_by_rank: number of elements of each rank.
        local_ranges: what this rank has of each parameter.
        sharded: whether ranks have different shards.
        communicates: whether an unshard communicates.
        shares_unsharded: whether all ranks see one and the same ``unsharded``.
        rows: whether shards are whole rows.
        requires_grad: of all parameters.
        devices: where its memory lies.
        group: the ranks that share it.
        dtype: of the shards.
        compute_dtype: in forward and backward.
        shards: this rank's shard of each parameter: 1D by element, or whole rows.
        unsharded: each parameter in its own shape.
        flat_shard: this rank's shards end to end, 1D; None where they do not lie so.
        optimizer_params: the parameters, or a flat one that is all of this rank's shards.
        label: what errors and events call it.
    """

    sharded = True
    communicates = shares_unsharded = False
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
        self.numels_by_rank = layout.numels_by_rank
        self.local_ranges = layout.ranges[self.group.rank]
        self.shard_numel = sum(span.numel for span in self.local_ranges)
        self.shards: list[Tensor] = []
        self.unsharded: list[Tensor] = []
        self.flat_shard: Tensor | None = None
        self._allocate()
        self.optimizer_params = self.params

    @abstractmethod
    def _allocate(self) -> None:
        """Make ``shards``, ``unsharded`` and ``flat_shard``."""

    @abstractmethod
    def refresh(self) -> None:
        """The shards may have changed: make them ready for the next unshard."""

    @abstractmethod
    def unshard(self, *, async_op: bool = False) -> None:
        """Begin to make ``unsharded`` valid; with ``async_op`` return before it is."""

    @abstractmethod
    def wait_for_unshard(self) -> None:
        """Return when ``unsharded`` is valid, after ``unshard``."""

    @abstractmethod
    def reshard(self) -> None:
        """Give the memory of ``unsharded`` back, if it is this rank's alone."""

    @property
    @abstractmethod
    def unsharded_nbytes(self) -> int:
        """Bytes of ``unsharded`` now, beyond the shards; this rank's share of shared memory."""

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
        """Take this rank's shards of what was written into the unsharded parameters."""
        for i, param in enumerate(self.params):
            self.write_shard(i, param.data)

    def write_shard(self, i: int, value: Tensor) -> None:
        """Take this rank's shard of an unsharded parameter."""
        self.shards[i].copy_(self.shard_of(i, value))

    def shard_of(self, i: int, value: Tensor) -> Tensor:
        """This rank's shard of a tensor with the shape of parameter ``i``; a view if possible."""
        span = self.local_ranges[i]
        flat = value.detach().reshape(-1)[span.start : span.start + span.numel]
        return flat.view(self.shards[i].shape)

    def gather_tensor(self, i: int, shard: Tensor, *, label: str) -> Tensor:
        """The tensor of which every rank has a shard like that of parameter ``i``.

        All ranks call it; where nothing is sharded, it copies. Dtype and device are those of
        ``shard``.
        """
        if not self.sharded:
            return shard.detach().clone()
        sent = self.devices.to_device(shard.detach())
        gathered = sent.new_empty(self.layout.shapes[i])
        # Both layouts give the ranks consecutive ranges of one parameter, in rank order.
        lengths = [ranges[i].numel for ranges in self.layout.ranges]
        self.group.all_gather(gathered.view(-1).split(lengths), sent, label=label)
        return gathered.to(shard.device)

    def gather_gradients(self) -> list[Tensor | None]:
        """The unsharded gradient of each parameter; None where there is none. All ranks call it."""
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

    def shard_param(self, i: int) -> None:
        """Make parameter ``i``, which has its whole value, this rank's shard of it.

        Nothing else here refers to its old memory, so that is free.
        """
        param = self.params[i]
        with torch.no_grad():
            self.write_shard(i, param)
            # Of a gradient from before wrapping the rank keeps its shard, too.
            gradient = None if param.grad is None else self.shard_of(i, param.grad)
            param.grad = None
            param.data = self.shards[i]
            if gradient is not None:
                param.grad = gradient.to(param, copy=True)

    def take_replaced(self) -> None:
        """Take over the values of shards that were given other memory, as by ``param.data = x``.

        Raises:
            StateError: it has not the shape of this rank's shard.
        """
        for name, param, shard in self._replaced():
            if param.shape != shard.shape:
                raise StateError(
                    f"parameter {name!r} was given a value of {list(param.shape)}, and this "
                    f"rank's shard is {list(shard.shape)}: give whole values inside `with "
                    "model.full_parameters(writeback=True):`, which all ranks enter, or to "
                    "load_state_dict()"
                )
            self.devices.wait_for_unshards()
            with torch.no_grad():
                shard.copy_(param.data)
            param.data = shard

    def _replaced(self) -> list[tuple[str, nn.Parameter, Tensor]]:
        """Sharded parameters that somebody has given other memory: name, object, shard."""
        names = [member.name for member in self.members]
        known = [*zip(names, self.params, self.shards, strict=True)]
        if self.is_flat:
            assert self.flat_shard is not None
            known.append(
                (f"flat parameter of {self.label}", self.optimizer_params[0], self.flat_shard)
            )
        with torch._C.DisableTorchFunction():
            return [
                (name, param, shard)
                for name, param, shard in known
                if param.data_ptr() != shard.data_ptr() and (shard.numel() or param.numel())
            ]

    # One flat parameter ----------------------------------------------------------------------

    def flatten(self) -> None:
        """Give optimizers one parameter, 1D, in the place of all."""
        assert self.flat_shard is not None, "refused before anything was built"
        flat = nn.Parameter(self.flat_shard, requires_grad=self.requires_grad)
        self.optimizer_params = [flat]
        gradients = [param.grad for param in self.params]
        if any(gradient is not None for gradient in gradients):
            flat.grad = torch.zeros_like(self.flat_shard)
            for view, gradient in zip(self.split_by_param(flat.grad), gradients, strict=True):
                if gradient is not None:
                    view.copy_(gradient.view(-1))
        for param in self.params:
            param.grad = None

    @property
    def is_flat(self) -> bool:
        """Whether optimizers see one flat parameter."""
        return self.optimizer_params is not self.params

    def split_by_param(self, flat: Tensor) -> list[Tensor]:
        """What is like ``flat_shard``, split into what is like each shard; 1D."""
        return list(flat.split([span.numel for span in self.local_ranges]))

    # Facts -----------------------------------------------------------------------------------

    @property
    def is_recast(self) -> bool:
        """Whether unsharded parameters have another dtype than the shards, or another device."""
        return self.devices.offloads or self.dtype != self.compute_dtype

    def contains(self, address: int) -> bool:
        """Whether ``address`` lies in the memory of ``unsharded``."""
        for start, param in zip(self.layout.starts, self.unsharded, strict=True):
            if param.numel():
                itemsize = param.element_size()
                first = param.data_ptr() - start * itemsize
                return first <= address < first + self.layout.numel * itemsize
        return False

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's shards on the device."""
        return self.shard_numel * self.dtype.itemsize if self._local is None else self._local.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of this rank's shards on the host, where that is another memory."""
        return 0 if self._local is None else self._local.host_nbytes

    # Views of buffers ------------------------------------------------------------------------

    def views_in(self, buffer: Tensor) -> list[Tensor]:
        """Each parameter in its own shape, where it lies in an unsharded buffer."""
        return [
            buffer[start : start + numel_of(shape)].view(shape)
            for start, shape in zip(self.layout.starts, self.layout.shapes, strict=True)
        ]

    def _shard_views(self, buffer: Tensor, offsets: Sequence[int]) -> list[Tensor]:
        """This rank's shards, which begin at ``offsets``, in the shape that users see."""
        return [
            self._view_as_shard(buffer[offset : offset + span.numel], span.member)
            for offset, span in zip(offsets, self.local_ranges, strict=True)
        ]

    def _view_as_shard(self, flat: Tensor, i: int) -> Tensor:
        shape = self.layout.shapes[i]
        return view_as_rows(flat, shape) if self.rows else flat

    def _packed_offsets(self) -> list[int]:
        """Where this rank's shards begin when they lie end to end."""
        offsets, end = [], 0
        for span in self.local_ranges:
            offsets.append(end)
            end += span.numel
        return offsets


def wait_for_unshards(storages: Iterable[Storage]) -> None:
    """Return when no unshard of this rank reads its shards, so that they may be written."""
    for devices in {storage.devices for storage in storages}:
        devices.wait_for_unshards()


def refresh(storages: Sequence[Storage]) -> None:
    """Make the shards ready for the others, as they are now. All ranks meet after that."""
    wait_for_unshards(storages)  # once: each storage writes what unshards read
    with torch.no_grad():
        for storage in storages:
            storage.refresh()


def view_as_rows(flat: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The elements of whole rows of a tensor of this shape, viewed as these rows."""
    if not shape:
        return flat
    row_numel = math.prod(shape[1:])
    return flat.view(flat.numel() // row_numel if row_numel else 0, *shape[1:])
