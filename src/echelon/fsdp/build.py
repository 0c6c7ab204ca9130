"""From a module to units with memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from echelon.comm.group import Group
from echelon.comm.streams import is_cpu
from echelon.fsdp.flat_parameters import hide
from echelon.fsdp.gradients import GradientShard, Slots
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.initial_values import InitialValues
from echelon.fsdp.level import Level
from echelon.fsdp.policy import FSDPOptions, Offload, Strategy
from echelon.fsdp.shard_devices import ShardDevices
from echelon.fsdp.storage import Storage
from echelon.fsdp.storages import copy_storage, make_storage
from echelon.fsdp.unit import Unit
from echelon.fsdp.units import Member, UnitPlan


def build_units(
    module: nn.Module,
    ranks: HybridGroups,
    plans: Sequence[UnitPlan],
    options: FSDPOptions,
    start: InitialValues,
) -> tuple[list[Unit], list[Slots]]:
    """The units of ``module``, the root first, and where their gradients travel.

    All ranks call it. Each parameter arrives whole and becomes this rank's part before
    the next one comes, so the start takes the parts, and the memory of one unit.
    """
    places = ShardDevices(ranks, options.offload)
    start.begin()
    storages = [_fill(plan, _storages_of(plan, places, options), start) for plan in plans]
    start.finish()
    if options.offload is not Offload.NONE:
        masters = [part for unit in storages for one in unit for part in one.locals]
        assert all(is_cpu(part.device) for part in masters)
    built = _units_of([(plan.name, plan.module) for plan in plans], storages, ranks.shard, options)
    if (dtype := options.precision.buffers) is not None:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    return built


def copy_units(
    units: Sequence[Unit], module: nn.Module, ranks: HybridGroups, options: FSDPOptions
) -> tuple[list[Unit], list[Slots]]:
    """The same units of ``module``, a copy of theirs, in memory of their own.

    All ranks call it. Members are found by name, so a module may copy itself its way.
    """

    def renewed(member: Member) -> Member:
        owner = module.get_submodule(member.name.rpartition(".")[0])
        return Member(member.name, module.get_parameter(member.name), owner)

    storages = [
        [copy_storage(one, [renewed(member) for member in one.members]) for one in unit.storages]
        for unit in units
    ]
    named = [(unit.name, module.get_submodule(unit.name)) for unit in units]
    return _units_of(named, storages, ranks.shard, options)


def _units_of(
    named: Sequence[tuple[str, nn.Module]],
    storages: Sequence[Sequence[Storage]],
    group: Group,
    options: FSDPOptions,
) -> tuple[list[Unit], list[Slots]]:
    """Units with what their gradients and optimizers need."""
    slots = _Lots(group, options, storages)
    units, precision, level = [], options.precision, Level()
    for (name, module), own in zip(named, storages, strict=True):
        shards = []
        for i, one in enumerate(own):
            if not options.use_orig_params:
                one.flatten()
                hide(one.params, behind=f"{name}.flat_{i}".lstrip("."))
            if one.requires_grad:
                wire_dtype = _wire_dtype(one, options)
                grad_dtype = wire_dtype if precision.keep_low_precision_grads else one.dtype
                lot = slots.of(one, wire_dtype)
                shards.append(GradientShard(one, wire_dtype, grad_dtype, lot))
        units.append(Unit(name, module, own, shards, group, level))
    return units, slots.all


def _fill(plan: UnitPlan, storages: list[Storage], start: InitialValues) -> list[Storage]:
    """The storages of a unit with their initial values, and its parameters as their parts."""
    homes = {id(param): (one, i) for one in storages for i, param in enumerate(one.params)}
    # In the order of the model: the parameters of one module come together.
    for member in plan.members:
        storage, i = homes[id(member.param)]
        start.arrive(member.param)
        storage.settle(i)
    return storages


def _storages_of(plan: UnitPlan, places: ShardDevices, options: FSDPOptions) -> list[Storage]:
    """One storage for each combination of shard dtype, compute dtype and ``requires_grad``."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[Member]] = {}
    for member in plan.members:
        compute = _compute_dtype(member, options)
        key = _shard_dtype(member, options), compute, member.param.requires_grad
        kinds.setdefault(key, []).append(member)
    sharded = (
        options.strategy is not Strategy.NO_SHARD and plan.num_parameters >= options.min_num_params
    )
    return [
        make_storage(
            members,
            places,
            options.layout,
            dtype,
            compute,
            f"unit {plan.name or 'root'}",
            sharded=sharded,
        )
        for (dtype, compute, _), members in kinds.items()
    ]


def _compute_dtype(member: Member, options: FSDPOptions) -> torch.dtype:
    precision, dtype = options.precision, member.param.dtype
    kept = isinstance(member.owner, precision.keep)
    if precision.compute is None or kept or not dtype.is_floating_point:
        return dtype
    return precision.compute


def _shard_dtype(member: Member, options: FSDPOptions) -> torch.dtype:
    master, dtype = options.precision.master, member.param.dtype
    return dtype if master is None or not dtype.is_floating_point else master


def _wire_dtype(storage: Storage, options: FSDPOptions) -> torch.dtype:
    reduce = options.precision.reduce
    return storage.dtype if reduce is None or not storage.dtype.is_floating_point else reduce


class _Lots:
    """Who travels in which slots: one or two for all units in turn, one for each root storage.

    Where memory is not shared, two units are whole in backward, one of which has its gradients
    beside it: a second slot would exceed two units with their gradients.
    The root's gradients begin to come first and are complete last. With ``SHARD_OPTIMIZER`` every
    storage has a slot of its own, so no reduction waits for another.
    """

    def __init__(
        self, group: Group, options: FSDPOptions, storages: Sequence[Sequence[Storage]]
    ) -> None:
        self.all: list[Slots] = []
        self._own: dict[int, Slots] = {}
        self._shared: dict[torch.dtype, Slots] = {}
        largest: dict[torch.dtype, int] = {}
        for u, unit in enumerate(storages):
            for one in unit:
                if not one.requires_grad:
                    continue
                dtype = _wire_dtype(one, options)
                if u == 0 or options.strategy is Strategy.SHARD_OPTIMIZER:
                    self._own[id(one)] = self._make(group, one.cut.numel, dtype, 1)
                else:
                    largest[dtype] = max(largest.get(dtype, 0), one.cut.numel)
        for dtype, numel in largest.items():
            count = 2 if group.shares_memory else 1
            self._shared[dtype] = self._make(group, numel, dtype, count)

    def _make(self, group: Group, numel: int, dtype: torch.dtype, count: int) -> Slots:
        self.all.append(Slots(group, numel, dtype, count))
        return self.all[-1]

    def of(self, storage: Storage, wire_dtype: torch.dtype) -> Slots:
        """The slots of a storage whose gradients travel in ``wire_dtype``."""
        return self._own.get(id(storage)) or self._shared[wire_dtype]
