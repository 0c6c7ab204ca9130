"""This rank's shard of a storage: in which memory it is, and which streams copy it.

::

    host     masters, .grad, optimizer state         (offloaded; else on the device)
                │ cast, copy                ▲ copy
    device   own shard ─ all-gather ─> unsharded   reduced shard <─ reduce-scatter ─ gradients
                on `unshard_stream`                               on `reduce_stream`
"""

from __future__ import annotations

import weakref
from typing import final

import torch
from torch import Tensor

from echelon.comm.streams import Stream, device_of
from echelon.fsdp.hybrid_groups import HybridGroups
from echelon.fsdp.policy import Offload


def has_two_memories(offload: Offload, device: torch.device) -> bool:
    """Whether the shards of a model are kept in another memory than that of ``device``."""
    return offload is not Offload.NONE and not device_of(device).is_host


@final
class ShardDevices:
    """The memories and the streams of one model on one rank.

    Attributes:
        group: the ranks that share the model.
        unshard_group: the same ranks, for all-gathers.
        device: the device that computes and communicates.
        offload: what is kept on the host; NONE where that is the same memory.
        unshard_stream: the stream of all-gathers.
        reduce_stream: the stream of reductions.
        replica_stream: the stream of reductions over replicas, which follow them.
    """

    def __init__(self, groups: HybridGroups, offload: Offload) -> None:
        group = groups.shard
        self.group, self.unshard_group, self.device = group, groups.unshard, group.device
        self.offload = offload if has_two_memories(offload, group.device) else Offload.NONE
        # Simulated ranks do each other's work, so on a device all of it is on the current stream.
        device = device_of(group.device)
        new_stream = device.current_stream if group.shares_memory else device.side_stream
        self.unshard_stream: Stream = new_stream()
        self.reduce_stream: Stream = new_stream()
        has_replicas = groups.replicas is not None
        self.replica_stream = new_stream() if has_replicas else self.reduce_stream
        # They own memory, which a model that is dropped in a forward gives back while it is used.
        streams = dict.fromkeys((self.unshard_stream, self.reduce_stream, self.replica_stream))
        end = weakref.finalize(self, _order, *streams)
        end.atexit = False

    @property
    def offloads(self) -> bool:
        """Whether masters and gradients are in another memory than the device's."""
        return self.offload is not Offload.NONE

    def empty_shard(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory for masters or gradients."""
        if self.offloads:
            return self.empty_on_host(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=self.device)

    def empty_on_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory of the host from and to which copies are asynchronous."""
        return device_of(self.device).host_memory(numel, dtype)

    def to_device(self, shard: Tensor) -> Tensor:
        """A shard on the device; a copy if it was in another memory."""
        return device_of(self.device).copy_from_host(shard, always=self.offloads)

    def wait_for_unshards(self) -> None:
        """Return when no unshard reads the host's memory any more, so that it may be written."""
        if self.offloads:
            self.unshard_stream.record_event().synchronize()


def _order(*streams: Stream) -> None:
    """Order what follows on each stream, and on the current one, after the work of all."""
    for stream in streams:
        stream.record_event().wait()
    for stream in streams:
        stream.wait_for_current()


@final
class LocalShard:
    """The shard of one rank.

    Masters on the device are cast for each all-gather. Those on the host are cast there once a
    step, so that half the bytes cross the bus for a dtype of half the width, and every all-gather
    copies them to the device, unless that mirrors them.

    Args:
        mirrors: whether the device keeps the values of masters on the host, in the compute dtype.

    Attributes:
        masters: the shard that the optimizer sees, 1D.
        staged: the values that other ranks read, as of the last ``refresh``, 1D; ``masters`` itself
            where it is read directly.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        compute: torch.dtype,
        devices: ShardDevices,
        *,
        mirrors: bool = False,
    ) -> None:
        self._devices, self._compute, self._is_on_host = devices, compute, devices.offloads
        self.masters = self.staged = devices.empty_shard(numel, dtype)
        if self._is_on_host and dtype != compute:
            self.staged = devices.empty_on_host(numel, compute)
        self._mirror: Tensor | None = None
        if mirrors:
            self._mirror = torch.empty(numel, dtype=compute, device=devices.device)

    def refresh(self) -> None:
        """Copy the masters to all other memory of the shard, which no unshard reads now."""
        if self.staged is not self.masters:
            self.staged.copy_(self.masters)
        if self._mirror is not None:
            with self._devices.unshard_stream.as_current():
                self._mirror.copy_(self.staged, non_blocking=True)

    def send_buffer(self) -> Tensor:
        """The shard on the device in the compute dtype; called on the unshard stream."""
        if self._mirror is not None:
            return self._mirror
        if self._is_on_host:
            return self._devices.to_device(self.staged)
        return self.masters.to(self._compute)

    @property
    def nbytes(self) -> int:
        """The bytes on the device while the unit is sharded."""
        kept = self._mirror if self._is_on_host else self.masters
        return 0 if kept is None else kept.nbytes

    @property
    def host_nbytes(self) -> int:
        """The bytes in the memory of the host, where that is another memory."""
        if not self._is_on_host:
            return 0
        return self.masters.nbytes + (0 if self.staged is self.masters else self.staged.nbytes)
