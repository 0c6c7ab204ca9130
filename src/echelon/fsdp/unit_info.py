"""The units of an ``FSDP``, the shards of its parameters and its memory, as users see them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from echelon import checks
from echelon.errors import ArgumentError
from echelon.fsdp.gradient_reducer import GradientReducer
from echelon.fsdp.gradients import Slots
from echelon.fsdp.shard_layout import ShardInfo
from echelon.fsdp.storage import Storage
from echelon.fsdp.unit import Unit
from echelon.modules.compiled import plain_name
from echelon.state.optimizer_state import state_nbytes


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """Parameters that are unsharded together.

    Attributes:
        name: the name of the module; empty for the root.
        names: the names of the parameters, in the order of the buffers.
        numel: the number of elements of the unsharded unit.
        sharded: whether ranks have different shards.
        gathered: whether it is unsharded now.
    """

    name: str
    names: tuple[str, ...]
    numel: int
    sharded: bool
    gathered: bool


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The bytes that this rank holds for the model, and the number of collectives so far.

    All bytes but ``offloaded`` are on the device of the group.

    Attributes:
        shards: shards of parameters: masters, or their copies on the device.
        gathered: unsharded parameters, now; of shared memory, the share of this rank.
        gradients: shards of gradients.
        slots: the slots in which unsharded gradients travel.
        optimizer: the state of the optimizer, or None if none was given.
        peak_gathered: the most of ``gathered`` so far.
        peak_gradients: ``gradients``, and the most unsharded gradients so far that were complete
            and not yet in a slot, or kept under ``no_sync``.
        saved: the bytes of parameters and gradients that DDP would hold in addition.
        offloaded: shards of parameters and of gradients, and copies for the device, in the memory
            of the host; 0 where that is the memory of the device.
        num_all_gathers: the number of unshards of units.
        num_reduce_scatters: the number of reductions of gradients, one for each storage of a unit.
    """

    shards: int
    gathered: int
    gradients: int
    slots: int
    optimizer: int | None
    peak_gathered: int
    peak_gradients: int
    saved: int
    offloaded: int
    num_all_gathers: int
    num_reduce_scatters: int

    def by_category(self) -> dict[str, int]:
        """The current bytes by name, for a drawing; ``optimizer`` only where it is known."""
        nbytes = {
            "shards": self.shards,
            "gathered": self.gathered,
            "gradients": self.gradients,
            "slots": self.slots,
        }
        return nbytes if self.optimizer is None else {**nbytes, "optimizer": self.optimizer}


def unit_facts(units: Sequence[Unit]) -> tuple[UnitInfo, ...]:
    """One entry for each unit."""
    return tuple(
        UnitInfo(
            plain_name(unit.name),
            tuple(
                plain_name(member.name) for storage in unit.storages for member in storage.members
            ),
            sum(storage.layout.numel for storage in unit.storages),
            unit.is_sharded,
            unit.is_unsharded,
        )
        for unit in units
    )


def units_of(units: Sequence[Unit], names: Sequence[str]) -> list[Unit]:
    """The units that have these names, or parameters of modules with these names; else all.

    Raises ArgumentError if a name fits nothing.
    """
    indices: set[int] = set()
    for item in names:
        name = plain_name(item) if isinstance(item, str) else item
        fitting = {
            u
            for u, unit in enumerate(units)
            for path in [unit.name, *(m.name for storage in unit.storages for m in storage.members)]
            if name and f"{plain_name(path)}.".startswith(f"{name}.")
        }
        if not fitting:
            raise ArgumentError(
                f"full_parameters({item!r}): no unit, module with parameters, or "
                "parameter of this model has that name"
            )
        indices |= fitting
    return [units[u] for u in sorted(indices)] if names else list(units)


def shards_of(storages: Sequence[Storage], name: str) -> list[ShardInfo]:
    """Which shard of a parameter every rank has; ArgumentError if no storage has the parameter."""
    checks.instance("name", name, str)
    for storage in storages:
        for i, member in enumerate(storage.members):
            if plain_name(member.name) == plain_name(name):
                rank, size = storage.group.rank, storage.group.size
                if storage.sharded:
                    return storage.layout.info(i, rank)
                shape, numel = storage.layout.shapes[i], storage.local_ranges[i].numel
                return [ShardInfo(r, 0, numel, shape, r == rank) for r in range(size)]
    raise ArgumentError(f"Parameter {name!r} is in no unit of this model")


def count_parameters(module: nn.Module, storages: Sequence[Storage]) -> int:
    """The number of elements of the model, each counted once over all ranks."""
    ids = {id(param) for storage in storages for param in storage.params}
    others = sum(param.numel() for param in module.parameters() if id(param) not in ids)
    return others + sum(storage.layout.numel for storage in storages)


def memory_of(
    units: Sequence[Unit],
    slots: Sequence[Slots],
    reducer: GradientReducer,
    optimizer: Optimizer | None,
) -> MemoryStats:
    """Bytes by category, and counts."""
    storages = [storage for unit in units for storage in unit.storages]
    shards = sum(storage.nbytes for storage in storages)
    everything = sum(storage.layout.numel * storage.dtype.itemsize for storage in storages)
    gradients = sum(shard.nbytes for unit in units for shard in unit.gradient_shards)
    trainable = sum(
        shard.storage.layout.numel * shard.storage.dtype.itemsize
        for unit in units
        for shard in unit.gradient_shards
    )
    gathered = sum(storage.unsharded_nbytes for storage in storages)
    return MemoryStats(
        shards=shards,
        gathered=gathered,
        gradients=gradients,
        slots=sum(slot.nbytes for slot in slots),
        optimizer=None if optimizer is None else state_nbytes(optimizer),
        peak_gathered=max([gathered, *(unit.memory.peak for unit in units)]),
        peak_gradients=gradients + reducer.peak_nbytes,
        saved=everything - shards + trainable - gradients,
        offloaded=sum(storage.host_nbytes for storage in storages)
        + sum(shard.host_nbytes for unit in units for shard in unit.gradient_shards),
        num_all_gathers=sum(unit.num_unshards for unit in units),
        num_reduce_scatters=reducer.num_reductions,
    )
