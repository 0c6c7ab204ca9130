"""What a user can ask an ``FSDP`` about its units and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from echelon.errors import ArgumentError
from echelon.fsdp.cuts import ShardInfo
from echelon.fsdp.gradients import Slots
from echelon.fsdp.storage import Storage
from echelon.fsdp.unit import Unit

__all__ = [
    "MemoryStats",
    "UnitInfo",
    "count_parameters",
    "memory_of",
    "owners_of",
    "unit_facts",
]


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """Parameters that are gathered together.

    Attributes:
        name: of the module; empty for the root.
        names: of the parameters, in the order of the buffers.
        numel: of the whole unit.
        sharded: whether ranks keep different parts.
        gathered: whether it is whole now.
    """

    name: str
    names: tuple[str, ...]
    numel: int
    sharded: bool
    gathered: bool


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """Bytes that this rank holds for the model, and how often units moved.

    All but ``offloaded`` are on the device of the group.

    Attributes:
        shards: parts of parameters: masters, or what is kept of them on the device.
        gathered: whole parameters, now; the share of this rank where ranks share the memory.
        gradients: parts of gradients.
        slots: where whole gradients travel.
        saved: parameters and gradients that DDP would hold more.
        offloaded: parts of parameters and of gradients, and copies for the device, in the memory
            of the host; 0 where that is the device's.
        num_all_gathers: how often a unit was made whole.
        num_reduce_scatters: how often the gradients of a unit's storage were reduced.
    """

    shards: int
    gathered: int
    gradients: int
    slots: int
    saved: int
    offloaded: int
    num_all_gathers: int
    num_reduce_scatters: int


def unit_facts(units: Sequence[Unit]) -> tuple[UnitInfo, ...]:
    """One entry a unit."""
    return tuple(
        UnitInfo(
            unit.name,
            tuple(member.name for one in unit.storages for member in one.members),
            sum(one.cut.numel for one in unit.storages),
            any(one.sharded for one in unit.storages),
            unit.gathered,
        )
        for unit in units
    )


def owners_of(storages: Sequence[Storage], name: str) -> list[ShardInfo]:
    """Which part of a parameter every rank owns.

    Raises:
        ArgumentError: no storage has a parameter of that name.
    """
    for storage in storages:
        for i, member in enumerate(storage.members):
            if member.name == name:
                if storage.sharded:
                    return storage.cut.info(i)
                shape, numel = storage.cut.shapes[i], storage.own[i].numel
                return [ShardInfo(r, 0, numel, shape) for r in range(storage.group.size)]
    raise ArgumentError(f"Parameter {name!r} is in no unit of this model")


def count_parameters(module: nn.Module, storages: Sequence[Storage]) -> int:
    """Elements of all parameters, whole ones of those that are sharded."""
    ids = {id(param) for storage in storages for param in storage.params}
    others = sum(param.numel() for param in module.parameters() if id(param) not in ids)
    return others + sum(storage.cut.numel for storage in storages)


def memory_of(units: Sequence[Unit], slots: Sequence[Slots], num_reductions: int) -> MemoryStats:
    """Bytes by category, and counts."""
    storages = [storage for unit in units for storage in unit.storages]
    shards = sum(storage.nbytes for storage in storages)
    everything = sum(storage.cut.numel * storage.dtype.itemsize for storage in storages)
    gradients = sum(shard.nbytes for unit in units for shard in unit.shards)
    trainable = sum(
        shard.storage.cut.numel * shard.storage.dtype.itemsize
        for unit in units
        for shard in unit.shards
    )
    return MemoryStats(
        shards=shards,
        gathered=sum(storage.whole_nbytes for storage in storages),
        gradients=gradients,
        slots=sum(one.nbytes for one in slots),
        saved=everything - shards + trainable - gradients,
        offloaded=sum(storage.host_nbytes for storage in storages)
        + sum(shard.host_nbytes for unit in units for shard in unit.shards),
        num_all_gathers=sum(unit.num_gathers for unit in units),
        num_reduce_scatters=num_reductions,
    )
