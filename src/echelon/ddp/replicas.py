"""What makes ranks replicas: equal parameters, and buffers that are made equal again.

[Note: when buffers are sent]
A rank cannot know by itself whether the buffers of another rank have changed, and a broadcast that
only some ranks issue hangs. So each rank writes whether its buffers have changed into a notice of
the last gradient bucket. After the reduction all ranks read the same sum, so they agree without
further communication. If it is not zero, the next forward in training mode sends the buffers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.ddp.buckets import compute_buckets
from echelon.modules.parameters import is_claimed
from echelon.ranges import pack
from echelon.state.sharded_state import ShardedState, named_extras, named_state
from echelon.state.tensor_shard import Replication, whole


@final
class TrackedBuffers:
    """The buffers of ``module``, and the versions that the ranks last agreed on.

    A buffer that is replaced (``module.mean = tensor``) is tracked; one registered later is not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            (submodule._buffers, name)
            for submodule in module.modules()
            for name, buffer in submodule._buffers.items()
            if buffer is not None
        ]
        self._known: list[tuple[Tensor, int]] = []
        self.remember()

    def __len__(self) -> int:
        return len(self._slots)

    def tensors(self) -> list[Tensor]:
        """The buffers as they are now."""
        return [tensor for buffers, name in self._slots if (tensor := buffers[name]) is not None]

    def changed(self) -> bool:
        """Whether a buffer was replaced or written since ``remember``."""
        now = self.tensors()
        return len(now) != len(self._known) or any(
            tensor is not known or tensor._version != version
            for tensor, (known, version) in zip(now, self._known, strict=True)
        )

    def remember(self) -> None:
        """Remember the present versions as those that the ranks agree on."""
        self._known = [(tensor, tensor._version) for tensor in self.tensors()]


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[Tensor], group: Group, src: int, bucket_bytes: int, label: str
) -> None:
    """Copy ``tensors`` of rank ``src`` to all ranks, in place, in a few large broadcasts."""
    buckets = compute_buckets(
        [tensor.nbytes for tensor in tensors],
        bucket_bytes,
        kinds=[tensor.dtype for tensor in tensors],
        order=range(len(tensors)),
    )
    for bucket in buckets:
        members = [tensors[i] for i in bucket]
        if len(members) == 1 and members[0].is_contiguous():
            group.broadcast(members[0], src, label=label)
            continue
        placement = pack([tensor.numel() for tensor in members])
        flat = torch.empty(placement.numel, dtype=members[0].dtype, device=group.device)
        views = [
            flat[start : start + tensor.numel()].view(tensor.shape)
            for start, tensor in zip(placement.starts, members, strict=True)
        ]
        # Also where they are replaced: a dry run, which receives nothing, goes on with its values.
        torch._foreach_copy_(views, members)
        group.broadcast(flat, src, label=label)
        if group.rank != src:
            torch._foreach_copy_(members, views)


def replicated_state(
    module: nn.Module, group: Group, broadcast_buffers: Collection[Tensor]
) -> ShardedState:
    """The state of ``module``, of which every rank of ``group`` holds all.

    Rank 0's values of ``broadcast_buffers`` count; of other buffers every rank has its own values.
    """
    broadcast_ids = {id(buffer) for buffer in broadcast_buffers}

    def replication(tensor: Tensor) -> Replication:
        if isinstance(tensor, nn.Parameter):
            return Replication.IDENTICAL if is_claimed(tensor) else Replication.PER_RANK
        return Replication.PRIMARY if id(tensor) in broadcast_ids else Replication.PER_RANK

    shards = [
        (tensor, whole(names, tensor, group.rank, group.size, replication(tensor)))
        for names, tensor in named_state(module)
    ]
    return ShardedState(
        tensors=tuple(shard for _, shard in shards),
        params={tensor: (shard,) for tensor, shard in shards if isinstance(tensor, nn.Parameter)},
        extras=tuple(named_extras(module)),
        axes=(group,),
    )
