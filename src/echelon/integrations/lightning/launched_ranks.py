"""Ranks that a launcher has started, as the strategies of Lightning see them.

``torch.distributed`` gets a default group, too, because metrics of ``torchmetrics``, collectives of
Lightning and other guests of a script ask it: over shared memory, that of ``echelon.c10d``.
"""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities import rank_zero
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning_utilities.core import rank_zero as rank_zero_of_utilities

import echelon.c10d
from echelon.comm.streams import device_of
from echelon.comm.world import World
from echelon.errors import ArgumentError, UnsupportedError, WorldError
from echelon.integrations.sharing import Sharing
from echelon.launch.run import init
from echelon.process.environment import environment
from echelon.train.scaling import GradScaler

_Sent = TypeVar("_Sent")


class LaunchedRanks:
    """What both strategies have in common: a mixin before Lightning's ``ParallelStrategy``.

    Attributes:
        sharing: how the ranks share a model.
        num_nodes: as the user gave it to the Trainer or to Fabric.
        is_distributed: the Trainer gives each rank its share of the samples.
    """

    sharing: Sharing
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    num_nodes = 1
    is_distributed = True

    @property
    def _is_interrupted(self) -> bool:
        """Whether this rank is ending by an error, so that others may be anywhere."""
        return False

    def _prepare(self, sharing: Sharing, timeout: timedelta | None) -> None:
        if sharing.num_stages > 1:
            raise UnsupportedError(
                f"the plan is {sharing.plan}, and Lightning calls the whole model in each step, "
                "which stages of a pipeline cannot be: use pp=1, or ec.Pipeline in a loop"
            )
        if timeout is not None and (
            not isinstance(timeout, timedelta) or timeout <= timedelta(seconds=0)
        ):
            raise ArgumentError(
                f"timeout is {timeout!r:.80}; give a datetime.timedelta of more than nothing"
            )
        self.sharing = sharing
        self._timeout = timeout
        self._job = environment(os.environ)
        self._world: World | None = None

    def _configure_launcher(self) -> None:
        """Start nothing, and check that the launcher has started as many ranks as are asked for."""
        assert self.parallel_devices is not None, "Lightning has set it"
        if self._job is None:
            asked = len(self.parallel_devices) * self.num_nodes
            if asked > 1:
                raise WorldError(
                    f"devices={len(self.parallel_devices)} and num_nodes={self.num_nodes} ask for "
                    f"{asked} ranks, and this strategy starts no processes: start the script with "
                    f"`echelon run --ranks {asked} train.py`, torchrun or srun"
                )
            return
        if (
            len(self.parallel_devices) == 1 and device_of(self.parallel_devices[0]).is_host
        ):  # as by "auto"
            self.parallel_devices = self.parallel_devices * self._job.local_size
        if len(self.parallel_devices) != self._job.local_size:
            raise ArgumentError(
                f"devices is {len(self.parallel_devices)}, and {self._job.local_size} ranks were "
                "started on this host: leave devices out, or start as many ranks"
            )
        self._tell_rank()

    def _tell_rank(self) -> None:
        for module in (rank_zero, rank_zero_of_utilities):
            cast(Any, module).rank_zero_only.rank = self.global_rank

    def _meet(self) -> World:
        """The world of all ranks. The first call meets the others."""
        if self._world is not None and self._world.is_open:
            return self._world
        seconds = None if self._timeout is None else self._timeout.total_seconds()
        world = init(timeout=seconds)
        if world.backend == "threads":
            raise UnsupportedError(
                "Lightning keeps the rank of a process in its globals, so ranks must be processes: "
                "use `echelon run --world processes`"
            )
        if device_of(world.device).is_host != device_of(self.root_device).is_host:
            raise UnsupportedError(
                f"Lightning uses {self.root_device} and echelon {world.device}: give the Trainer "
                "an accelerator that is of this device, or hide the others (CUDA_VISIBLE_DEVICES=)"
            )
        if world.size > 1:
            self._meet_in_torch(world)
        self._tell_rank()
        self._world = world
        return world

    def _meet_in_torch(self, world: World) -> None:
        if dist.is_initialized():
            return
        backend = echelon.c10d.BACKEND if world.backend == "shm" else world.backend
        limit = timedelta(seconds=world.group.timeout)
        assert self.cluster_environment is not None, "Lightning has set it"
        _init_dist_connection(
            self.cluster_environment, backend, world.rank, world.size, timeout=limit
        )
        atexit.register(_leave_torch)

    def _share_scaler(self, precision: Any) -> None:
        """Let ranks that hold shards skip a step together: each sees gradients of its own."""
        scaler = getattr(precision, "scaler", None)
        if type(scaler) is torch.amp.GradScaler and scaler.is_enabled():
            precision.scaler = GradScaler(
                self._meet().group,
                init_scale=scaler.get_scale(),
                growth_factor=scaler.get_growth_factor(),
                backoff_factor=scaler.get_backoff_factor(),
                growth_interval=scaler.get_growth_interval(),
            )

    # What Lightning asks of a strategy -------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None, "Lightning has set it"
        return self.parallel_devices[self.local_rank]

    @property
    def global_rank(self) -> int:
        """This rank in the job."""
        return 0 if self._job is None else self._job.rank

    @property
    def local_rank(self) -> int:
        """This rank among those of its host."""
        return 0 if self._job is None else self._job.local_rank

    @property
    def world_size(self) -> int:
        """The number of ranks in the job."""
        return 1 if self._job is None else self._job.size

    @property
    def num_processes(self) -> int:
        """The number of ranks on this host."""
        return 1 if self._job is None else self._job.local_size

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which share of the samples this rank reads."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks."""
        if self._world is not None and not self._is_interrupted:
            self._world.group.barrier(label=name or "")

    def broadcast(self, obj: _Sent, src: int = 0) -> _Sent:
        """The object of one rank, on all ranks."""
        if self._world is None or self._is_interrupted:
            return obj
        sent: _Sent = self._world.group.broadcast_object(obj, src, pickle=True)
        return sent

    def _reduce(self, value: Any, group: Any, reduce_op: Any) -> Any:
        """A tensor reduced in place over ranks; other values as they are, as Lightning does."""
        if isinstance(value, torch.Tensor) and not self._is_interrupted:
            return _sync_ddp_if_available(value, group, reduce_op=reduce_op)
        return value


def _leave_torch() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
