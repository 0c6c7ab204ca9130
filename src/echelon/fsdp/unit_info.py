"""What a user can ask an ``FSDP`` about its units and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from echelon import checks
from echelon.errors import ArgumentError
from echelon.fsdp.gradient_reducer import GradientReducer
from echelon.fsdp.gradients import Slots
from echelon.fsdp.shard_layout import ShardInfo
from echelon.fsdp.storage import Storage
from echelon.fsdp.unit import Unit
from echelon.modules.compiled import plain_name


@dataclass(frozen=True, slots=True)
class UnitInfo:
    """Parameters that are unsharded together.

    Attributes:
        name: of the module; empty for the root.
        names: of the parameters, in the order of the buffers.
        numel: of the unsharded unit.
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
    """Bytes that this rank holds for the model, and how often units moved.

    All but ``offloaded`` are on the device of the group.

    Attributes:
        shards: of parameters: masters, or what is kept of them on the device.
        gathered: unsharded parameters, now; the share of this rank where ranks share the memory.
        gradients: shards of gradients.
        slots: where unsharded gradients travel.
        optimizer: state of the optimizer that was given, or None.
        peak_gathered: the most of ``gathered`` so far.
        peak_gradients: ``gradients``, and the most of unsharded ones that were complete and had
            not left for a slot, or were kept under ``no_sync``.
        saved: parameters and gradients that DDP would hold more.
        offloaded: shards of parameters and of gradients, and copies for the device, in the memory
            of the host; 0 where that is the device's.
        num_all_gathers: how often a unit was unsharded.
        num_reduce_scatters: how often the gradients of a unit's storage were reduced.
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
        """Live bytes, for a drawing; only what is known."""
        nbytes = {
            "shards": self.shards,
            "gathered": self.gathered,
            "gradients": self.gradients,
            "slots": self.slots,
        }
        return nbytes if self.optimizer is None else {**nbytes, "optimizer": self.optimizer}


def unit_facts(units: Sequence[Unit]) -> tuple[UnitInfo, ...]:
    """One entry a unit."""
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
    """The units with these names, or with parameters of modules that have them; all without names.

    Raises:
        ArgumentError: a name fits nothing.
    """
    found: set[int] = set()
    for given in names:
        name = plain_name(given) if isinstance(given, str) else given
        fitting = {
            u
            for u, unit in enumerate(units)
            for path in [unit.name, *(m.name for storage in unit.storages for m in storage.members)]
            if name and f"{plain_name(path)}.".startswith(f"{name}.")
        }
        if not fitting:
            raise ArgumentError(
                f"full_parameters({given!r}): no unit, module with parameters, or parameter of "
                "this model has that name"
            )
        found |= fitting
    return [units[u] for u in sorted(found)] if names else list(units)


def shards_of(storages: Sequence[Storage], name: str) -> list[ShardInfo]:
    """Which shard of a parameter every rank has.

    Raises:
        ArgumentError: no storage has a parameter of that name.
    """
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
    """Elements of all parameters on all ranks, each counted once."""
    ids = {id(param) for storage in storages for param in storage.params}
    others = sum(param.numel() for param in module.parameters() if id(param) not in ids)
    return others + sum(storage.layout.numel for storage in storages)


def state_nbytes(optimizer: Optimizer) -> int:
    """Bytes of all tensors of an optimizer's state."""
    checks.instance("optimizer", optimizer, Optimizer)
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


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
        peak_gathered=max([gathered, *(unit.unsharded_bytes.peak for unit in units)]),
        peak_gradients=gradients + reducer.peak_nbytes,
        saved=everything - shards + trainable - gradients,
        offloaded=sum(storage.host_nbytes for storage in storages)
        + sum(shard.host_nbytes for unit in units for shard in unit.gradient_shards),
        num_all_gathers=sum(unit.num_unshards for unit in units),
        num_reduce_scatters=reducer.num_reductions,
    )
