"""What one rank holds of a sharded model: its parts, and all of what is in no unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.state_dict import homes_of
from echelon.fsdp.storage import Storage, wait_for_unshards
from echelon.state.sharded_state import ParameterShards, ShardedState, named_extras, named_state
from echelon.state.tensor_shard import Replication, TensorShard, whole, whole_parameter


def holdings_of_shards(
    module: nn.Module,
    storages: Sequence[Storage],
    ranks: HybridGroups,
    before_write: Callable[[], None],
) -> ShardedState:
    """This rank's ranges of ``module``.

    Args:
        storages: where the parts lie, as they are outside of a pass.
    """
    ranges = _ranges(module, storages, ranks)
    copy, num_copies = ranks.copy_of_all
    shards = {
        tensor: ranges.get(id(tensor))
        or whole(names, tensor, copy, num_copies, Replication.PER_RANK)
        for names, tensor in named_state(module)
    }
    return ShardedState(
        tensors=tuple(shards.values()),
        params=_by_param(shards, storages, ranks),
        extras=tuple(named_extras(module)),
        axes=ranks.groups,
        before_write=before_write,
    )


def parameter_shards_of(
    module: nn.Module, storages: Sequence[Storage], ranks: HybridGroups
) -> ParameterShards:
    """This rank's ranges of the parameters of ``module``, as an optimizer has them."""
    homes, ranges = homes_of(storages), _ranges(module, storages, ranks)
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

    by_param = _by_param(shards, storages, ranks)
    return ParameterShards(
        by_param=by_param,
        group=ranks.shard,
        assemble=assemble,
        before_write=lambda: wait_for_unshards(storages),
    )


def _ranges(
    module: nn.Module, storages: Sequence[Storage], ranks: HybridGroups
) -> dict[int, TensorShard]:
    """The ranges of the parameters that are in units, by the ``id`` of the parameter."""
    homes = homes_of(storages)
    return {
        id(tensor): _part(home.storage, home.i, names, ranks)
        for names, tensor in named_state(module)
        if (home := homes.get(id(tensor))) is not None
    }


def _by_param(
    shards: Mapping[Any, TensorShard], storages: Sequence[Storage], ranks: HybridGroups
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
            shards.get(param) or _part(storage, i, (member.name,), ranks)
            for i, (param, member) in enumerate(members)
        )
    return by_param


def _part(storage: Storage, i: int, names: tuple[str, ...], ranks: HybridGroups) -> TensorShard:
    copy, num_copies = ranks.copy_of_shard if storage.sharded else ranks.copy_of_all
    return TensorShard(
        names=names,
        shape=storage.layout.shapes[i],
        start=storage.local_ranges[i].start,
        values=storage.shards[i],
        copy=copy,
        num_copies=num_copies,
        tensor=storage.params[i],
    )
