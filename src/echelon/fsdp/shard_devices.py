"""Where the bytes of a sharded model lie, and on which streams they move.

::

    host     masters, .grad, optimizer state      (offloaded; else on the device)
                │ cast, copy             ▲ copy
    device   own part ─ gather ─> whole  │ reduced ── gradients
             stream of gathers             stream of reductions
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from echelon.comm.streams import Stream, host_memory, is_cpu, new_stream
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.policy import Offload


def has_two_memories(offload: Offload, device: torch.device) -> bool:
    """Whether the parts of a model are kept in another memory than that of ``device``."""
    return offload is not Offload.NONE and not is_cpu(device)


@final
class ShardDevices:
    """The memories of one model on one rank, and its streams.

    Attributes:
        group: ranks that share the model.
        gather_group: the same ranks, for gathers.
        device: where it computes and communicates.
        offload: what is kept on the host; NONE where that is the same memory.
        gathers: the stream on which parts become whole.
        reductions: the stream on which gradients are reduced.
    """

    def __init__(self, ranks: HybridGroups, offload: Offload) -> None:
        group = ranks.shard
        self.group, self.gather_group, self.device = group, ranks.gathers, group.device
        self.offload = offload if has_two_memories(offload, group.device) else Offload.NONE
        # Simulated ranks do each other's work, so on a device they need one order for all of it.
        own = not group.shares_memory
        self.gathers: Stream = new_stream(group.device, own=own)
        self.reductions: Stream = new_stream(group.device, own=own)

    @property
    def offloads(self) -> bool:
        """Whether masters and gradients are in another memory than the device's."""
        return self.offload is not Offload.NONE

    def kept(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory for masters or gradients."""
        if self.offloads:
            return self.on_host(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def on_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that copies can use while it goes on."""
        return host_memory(numel, dtype, self.device)

    def on_device(self, kept: Tensor) -> Tensor:
        """What is kept, where it is computed and communicated; a copy if that is another memory."""
        return kept.to(self.device, non_blocking=True, copy=self.offloads)

    def rest(self) -> None:
        """Return when no gather reads the host's memory any more, so that it may be written."""
        if self.offloads:
            self.gathers.record_event().synchronize()
