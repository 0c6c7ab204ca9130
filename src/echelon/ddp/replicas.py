"""What one rank holds of a replicated model: all of it, some of it kept alike."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.modules.parameters import is_claimed
from echelon.state.sharded_state import Replication, ShardedState, named_extras, named_state, whole


def holdings_of_replica(module: nn.Module, group: Group, sent: Collection[Tensor]) -> ShardedState:
    """All of ``module``, of which every rank of ``group`` has a copy.

    Args:
        sent: the buffers that rank 0 sends to the others.
    """
    sent_ids = {id(buffer) for buffer in sent}

    def kept(tensor: Tensor) -> Replication:
        if isinstance(tensor, nn.Parameter):
            return Replication.EQUAL if is_claimed(tensor) else Replication.OWN
        return Replication.FIRST if id(tensor) in sent_ids else Replication.OWN

    found = [
        (tensor, whole(names, tensor, group.rank, group.size, kept(tensor)))
        for names, tensor in named_state(module)
    ]
    return ShardedState(
        tensors=tuple(one for _, one in found),
        params={tensor: (one,) for tensor, one in found if isinstance(tensor, nn.Parameter)},
        extras=tuple(named_extras(module)),
        axes=(group,),
    )
