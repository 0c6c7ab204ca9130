"""Makes groups: a new job from a store, a group from a process group that exists, and subgroups."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import cast, final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.errors import ArgumentError, UnsupportedError, WorldError
from echelon.world.base import DEFAULT_TIMEOUT_S
from echelon.world.environment import JobEnvironment
from echelon.world.torch_dist.group import PeerGroup, TorchGroup
from echelon.world.torch_dist.job import Job
from echelon.world.torch_dist.native import NativeGroup
from echelon.world.torch_dist.peers import Engine, Peers
from echelon.world.torch_dist.rendezvous import await_all, report_here

__all__ = ["check_wanted", "connect", "from_process_group"]

_LOOPBACK = "127.0.0.1"


def check_wanted(environ: dict[str, str] | None = None) -> bool:
    """Whether ``ECHELON_CHECK`` asks for the comparison of calls before each collective.

    Raises:
        WorldError: it is neither 0 nor 1.
    """
    value = (os.environ if environ is None else environ).get("ECHELON_CHECK", "")
    if value not in ("", "0", "1"):
        raise WorldError(f"ECHELON_CHECK is {value!r}: set it to 1, to 0, or not at all")
    return value == "1"


def connect(
    env: JobEnvironment,
    store: c10d.Store,
    *,
    backend: str,
    device: torch.device,
    timeout: float = DEFAULT_TIMEOUT_S,
    check: bool | None = None,
) -> tuple[TorchGroup, Callable[[BaseException | None], None]]:
    """The group of all ranks of a job. All ranks call it with the same arguments.

    Args:
        env: where this process stands in the job.
        store: what ``open_store`` returned.
        backend: ``"gloo"``, ``"nccl"`` or another one that ``torch.distributed`` knows.
        device: where the tensors of this rank live.
        timeout: seconds that a rank waits for others.
        check: compare the calls of all ranks before each collective; None: see ``check_wanted``.

    Returns:
        the group, and the function that ends it (for ``World``).

    Raises:
        CommTimeout: some ranks did not start; names them.
        WorldError: the engine could not start.
    """
    ranks = tuple(range(env.size))
    report_here(store, env.rank)
    await_all(store, ranks, timeout)
    job = Job(store, env.rank, env.size if env.rank == 0 and not env.agent_store else 0)
    maker = _Maker(
        job=job,
        backend=backend,
        device=device,
        timeout=timeout,
        check=check_wanted() if check is None else check,
        loopback=env.one_host and "GLOO_SOCKET_IFNAME" not in os.environ,
        default=None,
    )
    if backend not in ("gloo", "nccl"):
        if not dist.is_initialized():
            dist.init_process_group(
                backend,
                store=c10d.PrefixStore("default", store),
                rank=env.rank,
                world_size=env.size,
                timeout=timedelta(seconds=timeout),
            )
        maker = replace(maker, default=dist.group.WORLD)
    try:
        group = maker.make("world", ranks)
    except RuntimeError as error:
        raise WorldError(
            f"rank {env.rank} of {env.size} could not start {backend}: {error}. On several hosts, "
            "GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) names the network interface to use."
        ) from error
    return group, group.close


def from_process_group(
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    check: bool | None = None,
) -> TorchGroup:
    """A process group that exists, as a ``Group``. All its ranks call it.

    It stays the user's: closing the ``Group`` does not destroy it. Wrap it once; two wrappers
    number their calls independently.

    Args:
        device: where tensors live; None: the CPU if the group serves it, else the current device
            of the kind that it serves.

    Raises:
        ArgumentError: this rank is not in the group, or the group does not serve the device.

    Example:
        >>> # dist.init_process_group("gloo")
        >>> # group = from_process_group(dist.group.WORLD)
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        raise ArgumentError(f"rank {dist.get_rank()} is not in the process group of ranks {ranks}")
    backends = _backends(group)
    if device is None:
        device = torch.device("cpu")
        if "cpu" not in backends:
            kind = next(iter(backends))
            device = torch.device(kind, torch.get_device_module(kind).current_device())
    kind = str(device).split(":")[0]
    if kind not in backends:
        raise ArgumentError(f"the process group serves {list(backends)}, not {device}")
    store = c10d.PrefixStore("echelon", dist.distributed_c10d._get_process_group_store(group))
    maker = _Maker(
        job=Job(store, dist.get_rank()),
        backend=backends[kind],
        device=device,
        timeout=timeout,
        check=check_wanted() if check is None else check,
        loopback=False,
        default=group,
    )
    return maker.make("world", ranks)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """The name of the backend for each kind of device."""
    config = dist.get_backend_config(group)
    return dict(item.split(":", 1) for item in config.split(",")) if ":" in config else {}


@final
@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes the groups of one job on this rank.

    A subgroup's engine is built from a store of its own, whose name its ranks derive alike, so
    that no rank outside it takes part. ``torch.distributed.new_group`` would need all ranks of
    the job, or would name the group by the number of groups that this rank happens to be in.

    Attributes:
        loopback: whether gloo uses the loopback interface.
        default: the process group to use for the group ``"world"``, if the engine is not made here.
    """

    job: Job
    backend: str
    device: torch.device
    timeout: float
    check: bool
    loopback: bool
    default: dist.ProcessGroup | None

    def make(self, name: str, ranks: tuple[int, ...]) -> TorchGroup:
        """The group of ``ranks`` (in the job); all of them call it."""
        store = c10d.PrefixStore(f"group/{name}", self.job.store)
        rank = ranks.index(self.job.rank)
        default = self.default if name == "world" else None
        if self.backend == "gloo":
            engine = (
                self._gloo(store, rank, len(ranks)) if default is None else _cpu_engine(default)
            )
            peers = Peers(engine, rank, len(ranks), self.timeout)
            return PeerGroup(peers, self.job, name, ranks, self.device, self.make, self.check)
        check = None
        if self.check:
            side = self._gloo(c10d.PrefixStore("check", store), rank, len(ranks))
            check = Peers(side, rank, len(ranks), self.timeout)
        native, end = self._native(store, ranks, default)
        return NativeGroup(
            native, end, self.job, name, ranks, self.device, self.timeout, self.make, check
        )

    def _gloo(self, store: c10d.Store, rank: int, size: int) -> Engine:
        if str(self.device) != "cpu" and self.backend == "gloo":
            raise UnsupportedError(f"gloo sends messages from the CPU, not from {self.device}")
        limit = timedelta(seconds=self.timeout)
        if not self.loopback:
            return cast(Engine, c10d.ProcessGroupGloo(store, rank, size, limit))
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        options._timeout = limit
        return cast(Engine, c10d.ProcessGroupGloo(store, rank, size, options))

    def _native(
        self, store: c10d.Store, ranks: tuple[int, ...], default: dist.ProcessGroup | None
    ) -> tuple[Engine, Callable[[bool], None]]:
        """An engine for ``ranks``, and what ends it."""
        if default is not None:
            return cast(Engine, default), lambda failed: None
        if self.backend != "nccl":
            group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=self.timeout),
                use_local_synchronization=self.backend != "mpi",
            )
            return cast(Engine, group), lambda failed: None
        options = c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.timeout)
        nccl = c10d.ProcessGroupNCCL(store, ranks.index(self.job.rank), len(ranks), options)

        def end(failed: bool) -> None:
            # After a failure, peers may never answer, and a shutdown would wait for them.
            nccl.abort() if failed else nccl.shutdown()

        return cast(Engine, nccl), end


def _cpu_engine(group: dist.ProcessGroup) -> Engine:
    return cast(Engine, group._get_backend(torch.device("cpu")))
