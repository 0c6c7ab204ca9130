"""Makes groups: a new job from a store, a group from a process group that exists, and subgroups."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import cast, final

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from echelon.comm.secret import Secret
from echelon.comm.start_facts import agree, start_facts
from echelon.comm.streams import device_of
from echelon.comm.torch_dist.engines import (
    Engine,
    NativeEngine,
    backend_of_device_kind,
    cpu_engine,
    leave_running,
    start_gloo,
    start_native,
)
from echelon.comm.torch_dist.group import GroupSpec, PeerGroup, TorchGroup
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.native import NativeGroup
from echelon.comm.torch_dist.peers import PeerLost, Peers, await_peers
from echelon.comm.torch_dist.proof import conclude, strangers
from echelon.comm.torch_dist.rendezvous import check_start, meet, open_store, store_beside
from echelon.comm.world import DEFAULT_TIMEOUT_S, World
from echelon.diagnosis.failure_record import FailureRecord, Reason
from echelon.diagnosis.rank_monitor import RankMonitor, StepCounter
from echelon.errors import ArgumentError, AuthenticationError, EchelonError, WorldError
from echelon.process.environment import JobEnvironment
from echelon.process.listeners import announced

_CLOSED_BY_PEER = ("Connection closed by peer", "Connection reset by peer")  # as gloo says it
_TRIALS = 3  # of connecting without a stranger
_PROOF_S = 10.0  # for a peer to prove itself in the first trial; a busy host is slow


def check_wanted() -> bool:
    """Whether ``ECHELON_CHECK`` asks for the comparison of calls before each collective.

    Raises:
        WorldError: the value is neither 0 nor 1.
    """
    value = os.environ.get("ECHELON_CHECK", "")
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

    The ranks meet in a store, agree on a secret, and authenticate each other over each connection
    of gloo. If the script has made the default process group over this backend itself, that
    process group is used.

    Args:
        env: where this process stands in the job.
        backend: ``"gloo"``, ``"nccl"`` or another one that ``torch.distributed`` knows.
        device: where the tensors of this rank live; with gloo always the CPU.
        timeout: seconds that a rank waits for others.
        check: compare the calls of all ranks before each collective; None: see ``check_wanted``.
        monitor: of this rank; None: one that sees no other rank.

    Raises:
        AuthenticationError: a process that does not know the secret speaks as a rank.
        CommTimeout: some ranks did not start; names them.
        StartMismatch: the ranks were started differently; raised on all of them.
        WorldError: the store or the engine could not start.
    """
    device = torch.device("cpu") if backend == "gloo" else device
    monitor = RankMonitor.alone(env.rank) if monitor is None else monitor
    check = check_wanted() if check is None else check
    facts = start_facts(timeout=timeout, check=check)
    default = dist.group.WORLD  # None if there is none
    if default is not None and backend in backend_of_device_kind(default).values():
        group: TorchGroup = _wrapped(default, device, timeout, check, monitor)
        agree(group, facts)
        return _world(group, backend, env, monitor)
    store = open_store(env, timeout)  # may have to live until all ranks have left it
    rendezvous = meet(store, env, backend, timeout, monitor)
    check_start(rendezvous.store, env, facts, timeout)
    holds_store = env.rank == 0 and not rendezvous.is_kept
    job = Job(rendezvous.store, monitor, env.size if holds_store else 0)
    factory = GroupFactory(
        job=job,
        secret=rendezvous.secret,
        backend=backend,
        device=device,
        timeout=timeout,
        check=check,
        loopback=env.one_host and "GLOO_SOCKET_IFNAME" not in os.environ,
        one_host=env.one_host,
    )
    return _world(_first_group(factory, tuple(range(env.size))), backend, env, monitor)


def _first_group(
    factory: GroupFactory, ranks: tuple[int, ...], process_group: dist.ProcessGroup | None = None
) -> TorchGroup:
    """The group of all ranks. If it cannot start, this rank tells the others why."""
    job = factory.job
    try:
        if process_group is None:
            return factory.make("world", ranks)
        return factory.wrap("world", ranks, process_group)
    except PeerLost as lost:
        record = FailureRecord(
            rank=job.rank,
            reason=Reason.TIMEOUT if lost.late else Reason.LOST,
            doing=f"the start of {factory.backend} at echelon.init()",
            group="world",
            call=f"the start of {factory.backend}",
            place="echelon.init()",
            missing=tuple(ranks[rank] for rank in lost.missing),
            seconds=factory.timeout,
        )
        failure: EchelonError = job.diagnose(record, ranks)
        cause: Exception = lost
    except AuthenticationError as error:
        failure, cause = error, error
    except RuntimeError as error:
        failure = WorldError(
            f"rank {job.rank} of {len(ranks)} could not start {factory.backend}: {error}. On "
            "several hosts, GLOO_SOCKET_IFNAME (or NCCL_SOCKET_IFNAME) names the network "
            "interface to use."
        )
        cause = error
    job.close(failure)  # the others may have started, and would take this rank for dead
    raise failure from (None if failure is cause else cause)


def _world(group: TorchGroup, backend: str, env: JobEnvironment, monitor: RankMonitor) -> World:
    return World(
        group,
        backend=backend,
        local_rank=env.local_rank,
        close=group.close,
        steps=StepCounter(monitor.record_step, monitor.step_rows),
    )


def from_process_group(
    group: dist.ProcessGroup,
    *,
    device: torch.device | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    check: bool | None = None,
) -> TorchGroup:
    """Wrap a process group of torch as a ``Group``. All its ranks call it.

    The process group stays the user's: closing the ``Group`` does not destroy it. Wrap it once,
    because two wrappers number their calls independently.

    Args:
        device: where tensors live; None: the CPU if the group serves it, else the device that the
            group is bound to (``device_id`` of ``init_process_group``), else the current device of
            the kind that it serves.

    Raises:
        ArgumentError: this rank is not in the group, or the group does not serve the device, or is
            bound to another one.

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
    backends = backend_of_device_kind(group)
    device = _served_device(group, backends) if device is None else device
    kind = str(device).split(":")[0]
    if kind not in backends:
        raise ArgumentError(f"the process group serves {list(backends)}, not {device}")
    bound = group.bound_device_id
    if bound is not None and bound.type == kind and bound != device:
        raise ArgumentError(
            f"the process group is bound to {bound} (device_id of init_process_group), and "
            f"{device} is another device: give both the same"
        )
    group_store = dist.distributed_c10d._get_process_group_store(group)
    store, secret = store_beside(group_store, group.group_name, ranks, dist.get_rank(), timeout)
    factory = GroupFactory(
        job=Job(store, monitor),
        secret=secret,
        backend=backends[kind],
        device=device,
        timeout=timeout,
        check=check_wanted() if check is None else check,
        loopback=False,
        one_host=True,  # so that listeners which other hosts can reach are always announced
    )
    return _first_group(factory, ranks, group)


def _served_device(group: dist.ProcessGroup, backends: Mapping[str, str]) -> torch.device:
    """The CPU if a process group serves it, else the device that it is bound to, or uses now."""
    if "cpu" in backends:
        return torch.device("cpu")
    if group.bound_device_id is not None:
        return group.bound_device_id
    kind = next(iter(backends))
    return torch.device(kind, torch.get_device_module(kind).current_device())


@final
@dataclass(frozen=True, kw_only=True)
class GroupFactory:
    """Makes the groups of one job on this rank.

    A subgroup's engine is built from a store of its own, whose name its ranks derive alike, so
    that no rank outside it takes part. ``torch.distributed.new_group`` would need all ranks of
    the job, or would name the group by the number of groups that this rank happens to be in.

    Attributes:
        secret: of the job, by which ranks authenticate each other; None where they cannot.
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

    def make(self, name: str, ranks: tuple[int, ...]) -> TorchGroup:
        """The group of ``ranks`` (in the job) with a new engine; all of them call it."""
        store, spec = self._store(name), self._spec(name, ranks)
        on_wait = partial(self._record_wait, ranks)
        if self.backend == "gloo":
            peers = self._authenticated_peers(store, name, ranks, on_wait)
            return PeerGroup(spec, peers, check=self.check)
        check_peers = self._check_peers(name, ranks)
        self._await_peers(store, ranks, on_wait)
        self._claim_device(name)
        native = start_native(
            self.backend, store, name, ranks, ranks.index(self.job.rank), self._limit
        )
        return NativeGroup(spec, native, check_peers)

    def wrap(
        self, name: str, ranks: tuple[int, ...], process_group: dist.ProcessGroup
    ) -> TorchGroup:
        """The group of ``ranks`` (in the job) over their process group; all of them call it."""
        spec = self._spec(name, ranks)
        if self.backend != "gloo":
            native = NativeEngine(
                cast(Engine, process_group),
                leave_running,
                abort=process_group.abort,
                queues=not device_of(self.device).is_host,
                averages=self.backend == "nccl",
            )
            return NativeGroup(spec, native, self._check_peers(name, ranks))
        peers = self._peers(cpu_engine(process_group), ranks, partial(self._record_wait, ranks))
        if intruders := self._strangers(peers, self._store(name), name, ranks, trial=0):
            peers.close()
            raise self._authentication_error(name, ranks, intruders)
        return PeerGroup(spec, peers, check=self.check)

    def _claim_device(self, name: str) -> None:
        """Refuse the device of another rank, for which NCCL would say something or hang.

        Raises:
            WorldError: names the rank that has it.
        """
        identity = device_of(self.device).identity()
        if identity is None or self.backend != "nccl":
            return
        key = f"device/{name}/{identity}"
        number = self.job.store.add(key, 1)
        if number == 1:
            self.job.store.set(f"{key}/rank", str(self.job.rank))
            return
        other = self.job.store.get(f"{key}/rank").decode()
        raise WorldError(
            f"ranks {other} and {self.job.rank} have one device, {device_of(self.device).name()} "
            f"({identity}), and NCCL takes one rank on each: start no more ranks on a host than it "
            "has devices, leave each rank its own in CUDA_VISIBLE_DEVICES, or say "
            "ec.init('gloo')"
        )

    def _check_peers(self, name: str, ranks: tuple[int, ...]) -> Peers | None:
        """The peers that compare the calls of a native group; None if calls are not compared."""
        if not self.check:
            return None
        store = c10d.PrefixStore("check", self._store(name))
        return self._authenticated_peers(store, f"{name}/check", ranks, lambda peer: None)

    def _authenticated_peers(
        self,
        store: c10d.Store,
        name: str,
        ranks: tuple[int, ...],
        on_wait: Callable[[int | None], None],
    ) -> Peers:
        """Connect ``ranks`` by a new engine, where each rank has proved that it is of this job.

        A stranger who is faster than a rank gets its connection. Then all ranks connect anew, a
        few times, and nothing that was sent over the connections of strangers is used.

        Raises:
            AuthenticationError: on all ranks, if there is a stranger each time.
        """
        intruders: list[int] = []
        for trial in range(_TRIALS):
            trial_store = c10d.PrefixStore(str(trial), store)
            self._await_peers(trial_store, ranks, on_wait)
            engine = self._gloo(trial_store, name, ranks)
            peers = self._peers(engine, ranks, on_wait)
            intruders = self._strangers(peers, store, name, ranks, trial)
            if not intruders:
                return peers
            peers.sever()
            peers.close()
            del engine, peers  # which ends its connections and its threads
        raise self._authentication_error(name, ranks, intruders)

    def _strangers(
        self, peers: Peers, store: c10d.Store, name: str, ranks: tuple[int, ...], trial: int
    ) -> list[int]:
        """The ranks of the group whose connections belong to strangers, alike on all ranks."""
        if self.secret is None or peers.size == 1:
            return []
        seconds = min(self.timeout, _PROOF_S * 2**trial)
        seen = strangers(peers, self.secret, f"{name}/{trial}", seconds)
        look = partial(self.job.look, ranks)
        trial_store = c10d.PrefixStore(str(trial), store)
        return conclude(trial_store, peers.rank, peers.size, seen, self.timeout, look)

    def _authentication_error(
        self, name: str, ranks: tuple[int, ...], intruders: list[int]
    ) -> AuthenticationError:
        return AuthenticationError([ranks[rank] for rank in intruders], f"in group {name!r}")

    def _gloo(self, store: c10d.Store, name: str, ranks: tuple[int, ...]) -> Engine:
        """A new engine for ``ranks``, whose address is announced if other hosts can reach it."""
        what = f"gloo for group {name!r}"
        rank, size = ranks.index(self.job.rank), len(ranks)
        with announced(self.job.rank, what, one_host=self.one_host):
            try:
                return start_gloo(store, rank, size, self._limit, loopback=self.loopback)
            except RuntimeError as error:
                # A peer that ends meanwhile is no fault of this rank's network. gloo does not say
                # which peer it was.
                if any(text in str(error) for text in _CLOSED_BY_PEER):
                    raise PeerLost((), late=False) from error
                raise

    def _peers(
        self, engine: Engine, ranks: tuple[int, ...], on_wait: Callable[[int | None], None]
    ) -> Peers:
        return Peers(engine, ranks.index(self.job.rank), len(ranks), self.timeout, on_wait)

    def _await_peers(
        self,
        store: c10d.Store,
        ranks: tuple[int, ...],
        on_wait: Callable[[int | None], None],
    ) -> None:
        await_peers(
            store,
            ranks.index(self.job.rank),
            len(ranks),
            self.timeout,
            check=partial(self.job.look, ranks),
            on_wait=on_wait,
        )

    def _record_wait(self, ranks: tuple[int, ...], peer: int | None) -> None:
        self.job.monitor.wait_for(None if peer is None else ranks[peer])

    def _store(self, name: str) -> c10d.Store:
        return c10d.PrefixStore(f"group/{name}", self.job.store)

    def _spec(self, name: str, ranks: tuple[int, ...]) -> GroupSpec:
        return GroupSpec(self.job, name, ranks, self.device, self.timeout, self._make_on)

    def _make_on(self, name: str, ranks: tuple[int, ...], device: torch.device) -> TorchGroup:
        """The group of ``ranks`` on ``device``: on another one than this job's, over gloo."""
        factory = self
        if device != self.device:
            factory = replace(self, backend="gloo", device=device)
        return factory.make(name, ranks)

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout)
