"""This rank's part of a storage: what the optimizer sees, and what a gather reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

import torch
from torch import Tensor

from echelon.fsdp.policy import Offload
from echelon.fsdp.shard_devices import ShardDevices


class LocalShard(ABC):
    """The part of one rank.

    Attributes:
        masters: what the optimizer sees. 1D
        staged: the same after ``prepare``, as others read it; ``masters`` themselves if they can.
    """

    masters: Tensor
    staged: Tensor

    @abstractmethod
    def prepare(self) -> None:
        """The masters may have changed: bring the rest up to date. No gather reads it now."""

    @abstractmethod
    def sent(self) -> Tensor:
        """The part on the device, in the compute dtype; called on the stream of gathers."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes on the device between gathers."""

    @property
    @abstractmethod
    def host_nbytes(self) -> int:
        """Bytes in the memory of the host, where that is another one."""


def make_masters(
    numel: int, dtype: torch.dtype, compute: torch.dtype, places: ShardDevices
) -> LocalShard:
    """The part of a storage whose whole buffer is always on the device.

    Args:
        dtype: of the masters.
        compute: in which the device wants them.
    """
    return (HostShard if places.offloads else DeviceShard)(numel, dtype, compute, places)


def make_local_shard(
    numel: int, dtype: torch.dtype, compute: torch.dtype, places: ShardDevices
) -> LocalShard:
    """The part of a storage that gathers read.

    Args:
        dtype: of the masters.
        compute: in which others get it.
    """
    if places.offload is Offload.OPTIMIZER:
        return MirroredShard(HostShard(numel, dtype, compute, places), places)
    return make_masters(numel, dtype, compute, places)


@final
class DeviceShard(LocalShard):
    """Masters on the device; cast for each gather where the dtypes differ."""

    def __init__(
        self, numel: int, dtype: torch.dtype, compute: torch.dtype, places: ShardDevices
    ) -> None:
        self.masters = places.kept(numel, dtype)
        self.staged = self.masters
        self._compute = compute

    def prepare(self) -> None:
        pass  # every gather takes the masters as they are

    def sent(self) -> Tensor:
        return self.masters.to(self._compute)

    @property
    def nbytes(self) -> int:
        return self.masters.nbytes

    @property
    def host_nbytes(self) -> int:
        return 0


@final
class HostShard(LocalShard):
    """Masters on the host, cast there once a step; every gather brings them to the device.

    The host casts, and not the device, so that half the bytes cross the bus for a dtype of half
    the width.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, compute: torch.dtype, places: ShardDevices
    ) -> None:
        self._places = places
        self.masters = places.kept(numel, dtype)
        self.staged = self.masters if dtype == compute else places.on_host(numel, compute)

    def prepare(self) -> None:
        if self.staged is not self.masters:
            self.staged.copy_(self.masters)

    def sent(self) -> Tensor:
        return self._places.on_device(self.staged)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def host_nbytes(self) -> int:
        own = 0 if self.staged is self.masters else self.staged.nbytes
        return self.masters.nbytes + own


@final
class MirroredShard(LocalShard):
    """Masters on the host, and their values in the compute dtype on the device."""

    def __init__(self, on_host: HostShard, places: ShardDevices) -> None:
        self._on_host, self._places = on_host, places
        self.masters, self.staged = on_host.masters, on_host.staged
        self._mirror = torch.empty(
            self.staged.numel(), dtype=self.staged.dtype, device=places.device
        )

    def prepare(self) -> None:
        self._on_host.prepare()
        with self._places.gathers.as_current():
            self._mirror.copy_(self.staged, non_blocking=True)

    def sent(self) -> Tensor:
        return self._mirror

    @property
    def nbytes(self) -> int:
        return self._mirror.nbytes

    @property
    def host_nbytes(self) -> int:
        return self._on_host.host_nbytes
