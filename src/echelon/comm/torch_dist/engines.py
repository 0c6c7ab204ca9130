"""The engines of torch below a group: which of them this build has, and how each one starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from echelon.errors import WorldError
from echelon.process import time_limits

LOOPBACK = "127.0.0.1"


class EngineWork(Protocol):
    """A work of c10d."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


class Engine(Protocol):
    """What this package calls of a c10d process group or of one of its backends."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> EngineWork: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> EngineWork: ...
    def allreduce(self, tensors: list[Tensor], opts: Any, /) -> EngineWork: ...
    def broadcast(self, tensors: list[Tensor], opts: Any, /) -> EngineWork: ...
    def reduce(self, tensors: list[Tensor], opts: Any, /) -> EngineWork: ...
    def alltoall_base(
        self, output: Tensor, input: Tensor, outs: list[int], ins: list[int], opts: Any, /
    ) -> EngineWork: ...
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any, /) -> EngineWork: ...
    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any, /) -> EngineWork: ...


class NativeEngine(NamedTuple):
    """An engine with collectives.

    Attributes:
        shut_down: ends it; the argument says whether the job failed.
        abort: ends what it has begun, so that nothing on the device waits for another rank.
        queues: whether calls wait on the device and not on the host.
        averages: whether its reductions have means of floating-point numbers.
    """

    engine: Engine
    shut_down: Callable[[bool], None]
    abort: Callable[[], None] = lambda: None
    queues: bool = False
    averages: bool = False


def available_backends() -> list[str]:
    """The backends that ``init`` can be given, besides our own.

    Example:
        >>> "gloo" in available_backends()
        True
    """
    if not dist.is_available():
        return []
    is_available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
        "ucc": dist.is_ucc_available(),
        "xccl": dist.is_xccl_available(),
    }
    return [name for name, available in is_available.items() if available]


def backend_for(kind: str) -> str:
    """The backend that serves a kind of accelerator: ``"nccl"`` for ``"cuda"``.

    Raises:
        WorldError: torch knows none.
    """
    try:
        return dist.get_default_backend_for_device(kind)
    except ValueError as error:
        raise WorldError(
            f"torch.distributed has no backend for {kind}: use backend 'gloo', which computes on "
            "the CPU"
        ) from error


def backend_of_device_kind(group: dist.ProcessGroup) -> dict[str, str]:
    """The name of the backend with which a process group serves each kind of device."""
    config = dist.get_backend_config(group)
    return dict(item.split(":", 1) for item in config.split(",")) if ":" in config else {}


def bound_device() -> torch.device | None:
    """The device to which the script has bound its default process group; None if to none."""
    group = dist.group.WORLD
    return None if group is None else group.bound_device_id


def cpu_engine(group: dist.ProcessGroup) -> Engine:
    """The backend with which a process group serves the CPU."""
    return cast(Engine, group._get_backend(torch.device("cpu")))


def start_gloo(
    store: c10d.Store, rank: int, size: int, limit: timedelta, *, loopback: bool
) -> Engine:
    """A new gloo engine, which listens on the loopback interface or where gloo chooses."""
    if not loopback:
        return cast(Engine, c10d.ProcessGroupGloo(store, rank, size, limit))
    options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = limit
    return cast(Engine, c10d.ProcessGroupGloo(store, rank, size, options))


def start_native(
    backend: str, store: c10d.Store, name: str, ranks: Sequence[int], rank: int, limit: timedelta
) -> NativeEngine:
    """A new engine of ``backend`` for ``ranks`` of the job, in which this one has ``rank``.

    Except for NCCL, the first one becomes torch's default process group and ends with it, because
    torch makes other backends only inside of a default process group.
    """
    if backend == "nccl":
        if not dist.is_nccl_available():
            raise WorldError("this build of torch has no NCCL: use backend 'gloo'")
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = limit + timedelta(seconds=time_limits.WATCHDOG_S)
        options.is_high_priority_stream = True  # so that small messages overtake large kernels
        options.group_name = dist.distributed_c10d.GroupName(name)  # in its reports
        options.global_ranks_in_group = list(ranks)
        nccl = c10d.ProcessGroupNCCL(store, rank, len(ranks), options)
        # After a failure, peers may never answer, and a shutdown would wait for them.
        return NativeEngine(
            cast(Engine, nccl),
            lambda failed: nccl.abort() if failed else nccl.shutdown(),
            abort=nccl.abort,
            queues=True,
            averages=True,
        )
    if not dist.is_initialized():
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=len(ranks), timeout=limit
        )
        return NativeEngine(cast(Engine, dist.group.WORLD), _destroy_default_group)
    group, _ = dist.distributed_c10d._new_process_group_helper(
        len(ranks),
        rank,
        list(ranks),
        backend,
        store,
        group_name=dist.distributed_c10d.GroupName(f"echelon/{name}"),
        timeout=limit,
    )
    return NativeEngine(cast(Engine, group), leave_running)


def leave_running(failed: bool) -> None:
    """Keep an engine that belongs to the user, or that ends with the default process group."""


def _destroy_default_group(failed: bool) -> None:
    dist.destroy_process_group()
