"""The state of a sharded model: copies of parameters, parts of states, a rank's ranges."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from echelon.errors import ArgumentError, StateError
from echelon.errors.message_text import misfit_text
from echelon.fsdp.hooks import Hooks
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.storage import Storage, wait_for_unshards
from echelon.modules.sharded_tensor import is_part, mark, sharding_of
from echelon.state.model_state import copy_of
from echelon.state.sharded_state import ParameterShards, ShardedState, named_extras, named_state
from echelon.state.tensor_shard import Replication, TensorShard, whole, whole_parameter


class Home(NamedTuple):
    """The storage of a parameter, and its index there."""

    storage: Storage
    i: int


def homes_of(storages: Sequence[Storage]) -> dict[int, Home]:
    """The storage of every parameter of a unit, by the ``id`` of the parameter."""
    return {
        id(param): Home(storage, i)
        for storage in storages
        for i, param in enumerate(storage.params)
    }


# Saving --------------------------------------------------------------------------------------


def copy_parameters(
    hooks: Hooks, *, keep: bool = True, device: torch.device | None = None
) -> dict[int, Tensor]:
    """Copies of all unsharded parameters, by their ``id``; one unit is unsharded at a time.

    All ranks call it. Without ``keep`` this rank only takes part, and returns nothing. The copies
    are on ``device``; None: where the shards are. Raises StateError inside a forward or a backward.
    """
    if hooks.busy and not hooks.always_shown:
        raise StateError("the whole state inside a forward or a backward: ask for it outside")
    if not hooks.always_shown:  # inside full_parameters() all units are unsharded, and stay so
        hooks.publish_shards()
    copies: dict[int, Tensor] = {}
    for unit in hooks.units:
        was_unsharded = unit.is_unsharded
        if any(map(_is_exact, unit.storages)):
            unit.unshard()
        for storage in unit.storages:
            for i, param in enumerate(storage.params):
                value = _unsharded_value(storage, i)
                if keep:
                    copies[id(param)] = copy_of(value, device or storage.shards[i].device)
        if not was_unsharded:
            unit.reshard()
    hooks.unsharder.wait_for_readers("the state was copied")
    return copies


def _is_exact(storage: Storage) -> bool:
    """Whether unsharded parameters have the values of the shards, not rounded for compute."""
    return storage.sharded and storage.compute_dtype == storage.dtype


def _unsharded_value(storage: Storage, i: int) -> Tensor:
    """An unsharded parameter in its own dtype."""
    if not storage.sharded:
        return storage.shards[i]
    if _is_exact(storage):
        return storage.unsharded[i]
    label = f"state of {storage.members[i].name}"
    return storage.gather_tensor(i, storage.shards[i], label=label)


def shards_by_id(storages: Sequence[Storage]) -> dict[int, Tensor]:
    """This rank's shards, by the ``id`` of their parameter; parts say that they are."""
    return {
        id(param): mark(shard, storage.shardings[i]) if storage.shows_parts else shard
        for storage in storages
        for i, (param, shard) in enumerate(zip(storage.params, storage.shards, strict=True))
    }


def show_parts(state: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Let the parts in a sharded state say of what they are, as those in ``parts`` do.

    Raises:
        ArgumentError: a part has another shape.
    """
    wrong = []
    for key, part in parts.items():
        if is_part(part) and isinstance(value := state.get(key), Tensor):
            shape, expected = tuple(value.shape), sharding_of(part).local_shape
            if shape != expected:
                wrong.append(f"{key}: {shape} instead of {expected}")
            else:
                state[key] = mark(value, sharding_of(part))
    if wrong:
        text = misfit_text([], [], wrong)
        raise ArgumentError(f"the sharded state does not fit this rank's parts: {text}")


# The ranges of this rank ---------------------------------------------------------------------


def holdings_of_shards(
    module: nn.Module,
    storages: Sequence[Storage],
    groups: HybridGroups,
    before_write: Callable[[], None],
) -> ShardedState:
    """This rank's ranges of the parameters and buffers of ``module``."""
    ranges = _ranges(module, storages, groups)
    copy, num_copies = groups.copy_of_all
    shards = {
        tensor: ranges.get(id(tensor))
        or whole(names, tensor, copy, num_copies, Replication.PER_RANK)
        for names, tensor in named_state(module)
    }
    return ShardedState(
        tensors=tuple(shards.values()),
        params=_by_param(shards, storages, groups),
        extras=tuple(named_extras(module)),
        axes=groups.groups,
        before_write=before_write,
    )


def parameter_shards_of(
    module: nn.Module, storages: Sequence[Storage], groups: HybridGroups
) -> ParameterShards:
    """This rank's ranges of the parameters of ``module``, as optimizers have them."""
    homes, ranges = homes_of(storages), _ranges(module, storages, groups)
    shards = {
        tensor: ranges.get(id(tensor)) or whole_parameter(names, tensor)
        for names, tensor in named_state(module)
        if isinstance(tensor, nn.Parameter)
    }

    def assemble(shard: TensorShard, values: Tensor, label: str) -> Tensor:
        home = homes.get(shard.identity)
        if home is None:
            return values.detach().clone()
        return home.storage.gather_tensor(home.i, values, label=label)

    by_param = _by_param(shards, storages, groups)
    return ParameterShards(
        by_param=by_param,
        group=groups.shard,
        assemble=assemble,
        before_write=lambda: wait_for_unshards(storages),
    )


def _ranges(
    module: nn.Module, storages: Sequence[Storage], groups: HybridGroups
) -> dict[int, TensorShard]:
    """The ranges of the parameters that are in units, by the ``id`` of the parameter."""
    homes = homes_of(storages)
    return {
        id(tensor): _tensor_shard(home.storage, home.i, names, groups)
        for names, tensor in named_state(module)
        if (home := homes.get(id(tensor))) is not None
    }


def _by_param(
    shards: Mapping[Any, TensorShard], storages: Sequence[Storage], groups: HybridGroups
) -> dict[nn.Parameter, tuple[TensorShard, ...]]:
    """The ranges of each parameter that an optimizer has; a flat one stands for several."""
    flat = [storage for storage in storages if storage.is_flat]
    inside = {param for storage in flat for param in storage.params}
    by_param: dict[nn.Parameter, tuple[TensorShard, ...]] = {
        param: (shard,)
        for param, shard in shards.items()
        if isinstance(param, nn.Parameter) and param not in inside
    }
    for storage in flat:
        members = zip(storage.params, storage.members, strict=True)
        by_param[storage.optimizer_params[0]] = tuple(
            shards.get(param) or _tensor_shard(storage, i, (member.name,), groups)
            for i, (param, member) in enumerate(members)
        )
    return by_param


def _tensor_shard(
    storage: Storage, i: int, names: tuple[str, ...], groups: HybridGroups
) -> TensorShard:
    copy, num_copies = groups.copy_of_shard if storage.sharded else groups.copy_of_all
    return TensorShard(
        names=names,
        shape=storage.layout.shapes[i],
        start=storage.local_ranges[i].start,
        values=storage.shards[i],
        copy=copy,
        num_copies=num_copies,
        tensor=storage.params[i],
    )
