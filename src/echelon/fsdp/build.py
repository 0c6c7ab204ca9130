"""From a module to units with memory and initial values, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from echelon.comm.group import Group
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError, ModelMismatch
from echelon.events import PeakBytes
from echelon.fsdp.gradients import GradientShard, Slots
from echelon.fsdp.hooks import Hooks
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.local_shard import ShardDevices
from echelon.fsdp.policy import FSDPOptions, MixedPrecision, Offload
from echelon.fsdp.state_dict import homes_of
from echelon.fsdp.storage import Storage
from echelon.fsdp.storage_kinds import copy_storage, make_storage
from echelon.fsdp.unit import Unit
from echelon.fsdp.units import Member, UnitPlan
from echelon.modules.model_agreement import Init, digest, has_plain_memory
from echelon.state.initialization import (
    Initializer,
    ParameterPlace,
    draw_seed,
    nothing_to_materialize,
    own_tensors,
)

# Units ---------------------------------------------------------------------------------------


@torch.inference_mode(mode=False)  # shards outlive the caller's mode
def build_units(
    module: nn.Module,
    groups: HybridGroups,
    plans: Sequence[UnitPlan],
    options: FSDPOptions,
    values: InitialValues,
) -> tuple[list[Unit], list[Slots]]:
    """Build the units of ``module``, the root first, and the slots in which gradients travel.

    All ranks call it. Each parameter gets its unsharded value and becomes this rank's shard before
    the next one does, so building takes the memory of all shards and of one unit.
    """
    devices = ShardDevices(groups, options.offload)
    values.begin()
    storages = [_fill(plan, _storages_of(plan, devices, options), values) for plan in plans]
    values.finish()
    if options.offload is not Offload.NONE:
        shards = [shard for of_unit in storages for storage in of_unit for shard in storage.shards]
        assert all(device_of(shard.device).is_on_host(shard) for shard in shards)
    modules = [(plan.name, plan.module) for plan in plans]
    built = _units_of(modules, storages, groups.shard, options)
    if (dtype := options.precision.buffers) is not None:
        for buffer in module.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    return built


def copy_units(
    units: Sequence[Unit], module: nn.Module, groups: HybridGroups, options: FSDPOptions
) -> tuple[list[Unit], list[Slots]]:
    """Build the same units for ``module``, a copy of the model, in memory of their own.

    All ranks call it. Members are found by name, so modules may define how they are copied.
    """

    def copied(member: Member) -> Member:
        owner = module.get_submodule(member.name.rpartition(".")[0])
        return Member(member.name, module.get_parameter(member.name), owner)

    storages = [
        [
            copy_storage(storage, [copied(member) for member in storage.members])
            for storage in unit.storages
        ]
        for unit in units
    ]
    modules = [(unit.name, module.get_submodule(unit.name)) for unit in units]
    return _units_of(modules, storages, groups.shard, options)


def restore_parameters(
    hooks: Hooks, storages: Sequence[Storage], values: Mapping[int, Tensor]
) -> None:
    """Give parameters their unsharded gradients, and ``values`` by ``id``. All ranks call it."""
    gradients = [storage.gather_gradients() for storage in storages]
    hooks.unsharder.wait_for_readers("gradients were copied")
    for storage, unsharded in zip(storages, gradients, strict=True):
        storage.follow_flat_parameter()
        storage.show_whole()
        for param, gradient in zip(storage.params, unsharded, strict=True):
            param.grad = None
            param.data = values[id(param)]
            param.grad = gradient


def broadcast_copies(storages: Sequence[Storage], groups: HybridGroups) -> None:
    """Copy the shard of the first replica to the others. All ranks call it."""
    for storage in storages:
        for member, shard in zip(storage.members, storage.shards, strict=True):
            label = f"initial {member.name}"
            if not storage.sharded:
                groups.broadcast(shard, label)
            elif groups.replicas is not None:
                groups.replicas.broadcast(shard, 0, label=label)


def _units_of(
    modules: Sequence[tuple[str, nn.Module]],
    storages: Sequence[Sequence[Storage]],
    group: Group,
    options: FSDPOptions,
) -> tuple[list[Unit], list[Slots]]:
    """The units, with gradient shards and flat parameters.

    Frozen parameters, as the base model of LoRA, have storages of their own and no gradient shard.
    """
    slots = _SlotsByStorage(group, options, storages)
    units, precision, memory = [], options.precision, PeakBytes()
    for (name, module), of_unit in zip(modules, storages, strict=True):
        gradient_shards = []
        for storage in of_unit:
            if not options.use_orig_params:
                storage.use_flat_parameter()
            if storage.requires_grad:
                wire_dtype = _wire_dtype(storage, options)
                grad_dtype = wire_dtype if precision.keep_low_precision_grads else storage.dtype
                shard = GradientShard(storage, wire_dtype, grad_dtype, slots.of(storage))
                gradient_shards.append(shard)
        units.append(Unit(name, module, of_unit, gradient_shards, group, memory))
    return units, slots.all


def _fill(plan: UnitPlan, storages: list[Storage], values: InitialValues) -> list[Storage]:
    """Give the parameters of a unit their initial values, and shard them."""
    homes = homes_of(storages)
    # In the order of the model, in which the parameters of one module follow each other.
    for member in plan.members:
        storage, i = homes[id(member.param)]
        values.materialize(member.param)
        storage.replace_param_by_shard(i)
    return storages


def _storages_of(plan: UnitPlan, devices: ShardDevices, options: FSDPOptions) -> list[Storage]:
    """One storage for each combination of shard dtype, compute dtype and ``requires_grad``."""
    kinds: dict[tuple[torch.dtype, torch.dtype, bool], list[Member]] = {}
    for member in plan.members:
        compute = _compute_dtype(member, options)
        key = _shard_dtype(member, options), compute, member.param.requires_grad
        kinds.setdefault(key, []).append(member)
    sharded = options.traits.shards and plan.num_parameters >= options.min_num_params
    return [
        make_storage(
            members,
            devices,
            options.layout,
            dtype,
            compute,
            f"unit {plan.name or 'root'}",
            sharded=sharded,
        )
        for (dtype, compute, _), members in kinds.items()
    ]


def check_batch_norms(
    module: nn.Module, precision: MixedPrecision, ignored: Collection[nn.Parameter]
) -> None:
    """Refuse a ``BatchNorm`` that would compute in another dtype than its running statistics.

    Torch takes weights and statistics of one dtype, and says so in the first forward only.

    Raises:
        ArgumentError: there is one; names it, both dtypes, and what keeps it in one.
    """
    left_alone = {id(param) for param in ignored}
    for name, norm in module.named_modules():
        if type(norm).forward is not _BatchNorm.forward:
            continue
        weight, mean = norm.weight, norm.running_mean
        if weight is None or mean is None or (precision.compute is precision.buffers is None):
            continue
        kept = isinstance(norm, precision.keep) or id(weight) in left_alone
        compute = weight.dtype if kept else precision.compute or weight.dtype
        statistics = precision.buffers or mean.dtype
        if compute != statistics:
            kind = type(norm).__name__
            keeps = f"Give MixedPrecision keep=(nn.{kind},), and it computes in {weight.dtype}"
            raise ArgumentError(
                f"module {name or kind!r} is a {kind} whose weights would compute in {compute}, "
                f"and its running statistics would be {statistics}: torch takes one dtype for "
                f"both. {keeps if compute != weight.dtype else 'Leave buffers= out'}"
            )


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


class _SlotsByStorage:
    """Which gradients travel in which slots.

    One or two slots serve all units in turn, but the root has its own: its first gradient arrives
    first and its last one last. With ``SHARD_OPTIMIZER`` every storage has a slot, so no reduction
    waits for another. Where memory is not shared, two units are unsharded in backward, and one of
    them has its gradients: with a second slot, a step would take more than two units with their
    gradients.
    """

    def __init__(
        self, group: Group, options: FSDPOptions, storages: Sequence[Sequence[Storage]]
    ) -> None:
        self.all: list[Slots] = []
        self._by_storage: dict[int, Slots] = {}
        takes_turns: dict[torch.dtype, list[Storage]] = {}
        for u, of_unit in enumerate(storages):
            for storage in of_unit:
                dtype = _wire_dtype(storage, options)
                if not storage.requires_grad:
                    continue
                if u == 0 or options.traits.keeps_gradient_buffers:
                    self._add(group, [storage], dtype, 1)
                else:
                    takes_turns.setdefault(dtype, []).append(storage)
        for dtype, users in takes_turns.items():
            self._add(group, users, dtype, 2 if group.shares_memory else 1)

    def _add(self, group: Group, users: Sequence[Storage], dtype: torch.dtype, count: int) -> None:
        numel = max(storage.layout.padded_numel for storage in users)
        self.all.append(Slots(group, numel, dtype, count))
        self._by_storage |= dict.fromkeys(map(id, users), self.all[-1])

    def of(self, storage: Storage) -> Slots:
        """The slots of a storage that needs a gradient."""
        return self._by_storage[id(storage)]


# Initial values ------------------------------------------------------------------------------


class _Source(Enum):
    """Where the initial value of a parameter or a buffer comes from."""

    RANK_0 = "rank 0 sends it"
    ITSELF = "each rank has it"
    MODULE = "its module initialises it, equally on every rank"


@final
class InitialValues:
    """Gives parameters and buffers their initial values, one at a time.

    Law: the values that a module makes depend on the base seed and on its name, neither on the
    number of ranks nor on how the model is sharded.

    ``on_meta`` has, by rank, the names of the tensors that it has on the meta device. Raises
    ModelMismatch if a value is needed of a rank that does not have it, and ArgumentError if a
    module cannot initialise itself.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: HybridGroups,
        init: Init,
        on_meta: Sequence[AbstractSet[str]],
        materialize: Callable[[nn.Module], None] | None,
    ) -> None:
        self._groups = groups
        self._places: dict[int, ParameterPlace] = {}
        self._sources: dict[int, _Source] = {}
        for owner_name, owner in module.named_modules():
            for local, tensor in own_tensors(owner):
                name = f"{owner_name}.{local}".lstrip(".")
                if id(tensor) not in self._places:
                    self._sources[id(tensor)] = _source_of(name, init, on_meta)
                    self._places[id(tensor)] = ParameterPlace(
                        name, owner_name, owner, tuple(tensor.shape)
                    )
        self._waiting = {id(tensor): tensor for tensor in [*module.parameters(), *module.buffers()]}
        self._initializer = Initializer(self._places, groups.shard.device, materialize)
        from_modules = [key for key, source in self._sources.items() if source is _Source.MODULE]
        if materialize is not None and not from_modules:
            raise nothing_to_materialize("on meta on all ranks")
        for key in from_modules:
            self._initializer.check(self._places[key])
        # Every rank draws once, so that equal random streams stay equal.
        self._seed: int = groups.broadcast_object(draw_seed()) if from_modules else 0

    def begin(self) -> None:
        """Give buffers their values that no module makes; a module may read them to make others."""
        for tensor in list(self._waiting.values()):
            is_parameter = isinstance(tensor, nn.Parameter)
            if not is_parameter and self._sources[id(tensor)] is not _Source.MODULE:
                self.materialize(tensor)

    def materialize(self, tensor: Tensor) -> None:
        """Give ``tensor``, once, its value in the same object, on the device of the group.

        All ranks call it in the same order.
        """
        if self._waiting.pop(id(tensor), None) is None:
            return
        place = self._places[id(tensor)]
        source = self._sources[id(tensor)]
        if source is _Source.MODULE:
            if tensor.is_meta:
                self._make(place.owner_name, place.owner)
        elif source is _Source.RANK_0:
            if tensor.is_meta:
                self._initializer.allocate(tensor)
            with torch.no_grad():
                self._receive(tensor, f"initial {place.name}")

    def _receive(self, tensor: Tensor, label: str) -> None:
        """Take rank 0's values; those of other classes stay, as in DDP.

        A buffer that has them already is not written: it may lie in memory that nobody may write.
        """
        if isinstance(tensor, nn.Parameter):
            if has_plain_memory(tensor):
                self._groups.broadcast(tensor.data, label)
            return
        received = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._groups.broadcast(received, label)
        if digest(received) != digest(tensor):
            tensor.data.copy_(received)

    def finish(self) -> None:
        """Give ignored parameters and buffers their values, which are in no unit."""
        for tensor in list(self._waiting.values()):
            self.materialize(tensor)

    def _make(self, name: str, module: nn.Module) -> None:
        """Let a module initialise the tensors that it is the first owner of."""
        owned = {
            id(tensor)
            for _, tensor in own_tensors(module)
            if self._sources[id(tensor)] is _Source.MODULE
            and self._places[id(tensor)].owner is module
        }
        self._initializer.make(name, module, owned, self._seed)


def _source_of(name: str, init: Init, on_meta: Sequence[AbstractSet[str]]) -> _Source:
    without = [name in names for names in on_meta]
    if all(without):
        return _Source.MODULE
    if any(without) and (init != "broadcast" or without[0]):
        needs = "rank 0's values" if init == "broadcast" else "the values of every rank"
        raise ModelMismatch(
            f"the device of {name!r}, and init={init!r} takes {needs}",
            {rank: "meta" if missing else "real" for rank, missing in enumerate(without)},
        )
    return _Source.RANK_0 if init == "broadcast" and len(on_meta) > 1 else _Source.ITSELF
