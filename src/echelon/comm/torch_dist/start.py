"""Makes groups: a new job from a store, a group from a process group that exists, and subgroups."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import cast, final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.comm.secret import Secret
from echelon.comm.start_facts import agree, start_facts
from echelon.comm.torch_dist.group import PeerGroup, TorchGroup
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.members import await_members
from echelon.comm.torch_dist.native import NativeGroup
from echelon.comm.torch_dist.peers import Engine, PeerLost, Peers
from echelon.comm.torch_dist.proof import conclude, strangers
from echelon.comm.torch_dist.rendezvous import (
    LOOPBACK,
    check_start,
    meet,
    open_store,
    store_beside,
)
from echelon.comm.world import DEFAULT_TIMEOUT_S, World
from echelon.diagnosis.failure_record import FailureRecord, Reason
from echelon.diagnosis.rank_monitor import RankMonitor, StepCounter
from echelon.errors import ArgumentError, AuthenticationError, EchelonError, WorldError
from echelon.process.environment import JobEnvironment
from echelon.process.listeners import announced

_TRIALS = 3  # to find connections that no stranger has
_PROOF_S = 10.0  # what a peer gets to prove itself in the first; a busy host is slow


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
    backend: str,
    *,
    device: torch.device,
    timeout: float = DEFAULT_TIMEOUT_S,
    check: bool | None = None,
    monitor: RankMonitor | None = None,
) -> World:
    """The world of all ranks of a job. All ranks call it with the same arguments.

    If the script has made the default process group over this backend itself, that one is used.

    Args:
        env: where this process stands in the job.
        backend: ``"gloo"``, ``"nccl"`` or another one that ``torch.distributed`` knows.
        device: where the tensors of this rank live; with gloo always the CPU.
        timeout: seconds that a rank waits for others.
        check: compare the calls of all ranks before each collective; None: see ``check_wanted``.
        monitor: of this rank; None: it knows of no others.

    Raises:
        CommTimeout: some ranks did not start; names them.
        StartMismatch: the ranks were started differently; on all of them.
        WorldError: the store or the engine could not start.
    """
    device = torch.device("cpu") if backend == "gloo" else device
    monitor = RankMonitor.alone(env.rank) if monitor is None else monitor
    check = check_wanted() if check is None else check
    facts = start_facts(timeout=timeout, check=check)
    default = dist.group.WORLD  # None if there is none
    if default is not None and backend in _backends(default).values():
        group: TorchGroup = _wrapped(default, device, timeout, check, monitor)
        agree(group, facts)
        return _world(group, backend, env, monitor)
    store = open_store(env, timeout)  # which may have to live until all ranks have left it
    rendezvous = meet(store, env, backend, timeout, monitor)
    check_start(rendezvous.store, env, facts, timeout)
    holds_store = env.rank == 0 and not rendezvous.is_kept
    job = Job(rendezvous.store, monitor, env.size if holds_store else 0)
    maker = _Maker(
        job=job,
        secret=rendezvous.secret,
        backend=backend,
        device=device,
        timeout=timeout,
        check=check,
        loopback=env.one_host and "GLOO_SOCKET_IFNAME" not in os.environ,
        one_host=env.one_host,
    )
    return _world(_first_group(maker, tuple(range(env.size))), backend, env, monitor)


def _first_group(
    maker: _Maker, ranks: tuple[int, ...], made: dist.ProcessGroup | None = None
) -> TorchGroup:
    """The group of all ranks; where it cannot start, the other ranks hear why."""
    job = maker.job
    try:
        return maker.make("world", ranks, made)
    except PeerLost as lost:
        mine = FailureRecord(
            rank=job.rank,
            reason=Reason.TIMEOUT if lost.late else Reason.LOST,
            doing=f"the start of {maker.backend} at echelon.init()",
            group="world",
            call=f"the start of {maker.backend}",
            place="echelon.init()",
            missing=tuple(ranks[rank] for rank in lost.missing),
            seconds=maker.timeout,
        )
        failure: EchelonError = job.diagnose(mine, ranks)
        cause: Exception = lost
    except AuthenticationError as error:
        failure, cause = error, error
    except RuntimeError as error:
        failure = WorldError(
            f"rank {job.rank} of {len(ranks)} could not start {maker.backend}: {error}. On several "
            "hosts, GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) names the network interface to use."
        )
        cause = error
    job.close(failure)  # the others may have started, and would take this one for dead
    raise failure from (None if failure is cause else cause)


def _world(group: TorchGroup, backend: str, env: JobEnvironment, monitor: RankMonitor) -> World:
    return World(
        group,
        backend=backend,
        local_rank=env.local_rank,
        close=group.close,
        steps=StepCounter(monitor.record_step),
    )


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
    return _wrapped(group, device, timeout, check, RankMonitor.alone(dist.get_rank()))


def _wrapped(
    group: dist.ProcessGroup,
    device: torch.device | None,
    timeout: float,
    check: bool | None,
    monitor: RankMonitor,
) -> TorchGroup:
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
    theirs = dist.distributed_c10d._get_process_group_store(group)
    store, secret = store_beside(theirs, group.group_name, ranks, dist.get_rank(), timeout)
    maker = _Maker(
        job=Job(store, monitor),
        secret=secret,
        backend=backends[kind],
        device=device,
        timeout=timeout,
        check=check_wanted() if check is None else check,
        loopback=False,
        one_host=True,  # as far as we know: what other hosts can reach is told then, too
    )
    return _first_group(maker, ranks, group)


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
        secret: of the job, by which ranks know one another; None where they cannot.
        loopback: whether gloo uses the loopback interface.
        one_host: whether all ranks are on this host.
    """

    job: Job
    secret: Secret | None
    backend: str
    device: torch.device
    timeout: float
    check: bool
    loopback: bool
    one_host: bool

    def make(
        self, name: str, ranks: tuple[int, ...], made: dist.ProcessGroup | None = None
    ) -> TorchGroup:
        """The group of ``ranks`` (in the job); all of them call it.

        Args:
            made: a process group of these ranks to use, instead of a new one.
        """
        store = c10d.PrefixStore(f"group/{name}", self.job.store)
        if self.backend == "gloo":
            engine = None if made is None else _cpu_engine(made)
            peers = self._peers(store, name, ranks, partial(self._tell, ranks), engine)
            return PeerGroup(peers, self.job, name, ranks, self.device, self.make, self.check)
        check = None
        if self.check:
            beside = c10d.PrefixStore("check", store)
            check = self._peers(beside, f"{name}/check", ranks, lambda peer: None)
        if made is None:
            look, tell = partial(self.job.look, ranks), partial(self._tell, ranks)
            rank = ranks.index(self.job.rank)
            await_members(store, rank, len(ranks), self.timeout, look, tell)
        native, end = self._native(store, name, ranks) if made is None else (made, _leave)
        return NativeGroup(
            cast(Engine, native),
            end,
            self.job,
            name,
            ranks,
            self.device,
            self.timeout,
            self.make,
            check,
        )

    def _tell(self, ranks: tuple[int, ...], peer: int | None) -> None:
        self.job.monitor.wait_for(None if peer is None else ranks[peer])

    def _peers(
        self,
        store: c10d.Store,
        name: str,
        ranks: tuple[int, ...],
        tell: Callable[[int | None], None],
        made: Engine | None = None,
    ) -> Peers:
        """The ranks behind an engine, each of which has proved that it is one of this job.

        A stranger who is faster than a rank has its connection. So it is all made anew, a few
        times, and what was sent over connections of strangers is not looked at.

        Args:
            made: an engine to use, instead of a new one.

        Raises:
            AuthenticationError: on all ranks, if there is a stranger each time.
        """
        rank, size = ranks.index(self.job.rank), len(ranks)
        found: list[int] = []
        for trial in range(_TRIALS if made is None else 1):
            own = c10d.PrefixStore(str(trial), store)
            if made is None:
                look = partial(self.job.look, ranks)
                await_members(own, rank, size, self.timeout, look, tell)
            engine = self._gloo(own, name, ranks) if made is None else made
            peers = Peers(engine, rank, size, self.timeout, tell)
            if self.secret is None or size == 1:
                return peers
            seconds = min(self.timeout, _PROOF_S * 2**trial)
            seen = strangers(peers, self.secret, f"{name}/{trial}", seconds)
            tell(None)  # a stranger may have let it wait in vain
            found = conclude(own, rank, size, seen, self.timeout, partial(self.job.look, ranks))
            if not found:
                return peers
            if made is None:
                peers.sever()
            peers.close()
            del engine, peers  # which ends its connections and its threads
        raise AuthenticationError([ranks[r] for r in found], f"in group {name!r}")

    def _gloo(self, store: c10d.Store, name: str, ranks: tuple[int, ...]) -> Engine:
        """A new engine for ``ranks``, which says where it listens if other hosts can see it."""
        what = f"gloo for group {name!r}"
        with announced(self.job.rank, what, one_host=self.one_host):
            return self._start_gloo(store, ranks.index(self.job.rank), len(ranks))

    def _start_gloo(self, store: c10d.Store, rank: int, size: int) -> Engine:
        limit = timedelta(seconds=self.timeout)
        if not self.loopback:
            return cast(Engine, c10d.ProcessGroupGloo(store, rank, size, limit))
        options = c10d.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = limit
        return cast(Engine, c10d.ProcessGroupGloo(store, rank, size, options))

    def _native(
        self, store: c10d.Store, name: str, ranks: tuple[int, ...]
    ) -> tuple[object, Callable[[bool], None]]:
        """A new engine for ``ranks``, and what ends it."""
        rank, limit = ranks.index(self.job.rank), timedelta(seconds=self.timeout)
        if self.backend == "nccl":
            if not dist.is_nccl_available():
                raise WorldError("this build of torch has no NCCL: use backend 'gloo'")
            options = c10d.ProcessGroupNCCL.Options()
            options._timeout = limit
            nccl = c10d.ProcessGroupNCCL(store, rank, len(ranks), options)
            # After a failure, peers may never answer, and a shutdown would wait for them.
            return nccl, lambda failed: nccl.abort() if failed else nccl.shutdown()
        if not dist.is_initialized():
            dist.init_process_group(
                self.backend, store=store, rank=rank, world_size=len(ranks), timeout=limit
            )
            return dist.group.WORLD, _destroy
        made, _ = dist.distributed_c10d._new_process_group_helper(
            len(ranks),
            rank,
            list(ranks),
            self.backend,
            store,
            group_name=dist.distributed_c10d.GroupName(f"echelon/{name}"),
            timeout=limit,
        )
        return made, _leave


def _leave(failed: bool) -> None:
    """The engine is the user's, or ends with the default process group."""


def _destroy(failed: bool) -> None:
    dist.destroy_process_group()


def _cpu_engine(group: dist.ProcessGroup) -> Engine:
    return cast(Engine, group._get_backend(torch.device("cpu")))
