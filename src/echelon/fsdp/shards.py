"""What one rank holds of a sharded model: its parts, and all of what is in no unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.state_dict import Home, homes_of
from echelon.fsdp.storage import Storage
from echelon.state.sharded_state import (
    Replication,
    ShardedState,
    TensorShard,
    named_extras,
    named_state,
    whole,
)


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
    homes = homes_of(storages)
    copy, num_copies = ranks.copy_of_all
    tensors: list[TensorShard] = []
    params: dict[nn.Parameter, tuple[TensorShard, ...]] = {}
    parts: dict[Home, TensorShard] = {}
    for names, tensor in named_state(module):
        home = homes.get(id(tensor))
        if home is None:
            one = whole(names, tensor, copy, num_copies, Replication.OWN)
        else:
            one = parts[home] = _part(home.storage, home.i, names, ranks)
        tensors.append(one)
        if isinstance(tensor, nn.Parameter) and not (home and home.storage.is_flat):
            params[tensor] = (one,)
    for storage in storages:
        if storage.is_flat:
            params[storage.exposed[0]] = tuple(
                parts.get(Home(storage, i)) or _part(storage, i, (member.name,), ranks)
                for i, member in enumerate(storage.members)
            )
    return ShardedState(
        tensors=tuple(tensors),
        params=params,
        extras=tuple(named_extras(module)),
        axes=ranks.groups,
        before_write=before_write,
    )


def _part(storage: Storage, i: int, names: tuple[str, ...], ranks: HybridGroups) -> TensorShard:
    copy, num_copies = ranks.copy_of_part if storage.sharded else ranks.copy_of_all
    return TensorShard(
        names=names,
        shape=storage.cut.shapes[i],
        start=storage.own[i].start,
        values=storage.locals[i],
        copy=copy,
        num_copies=num_copies,
        tensor=storage.params[i],
    )
