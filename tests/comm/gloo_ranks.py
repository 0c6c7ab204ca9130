"""Ranks as processes of this host that talk over gloo, or over a c10d engine's own collectives."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from echelon.comm.torch_dist import connect, open_store
from echelon.comm.torch_dist.engines import NativeEngine, leave_running
from echelon.comm.torch_dist.group import GroupSpec, PeerGroup
from echelon.comm.torch_dist.job import Job
from echelon.comm.torch_dist.native import NativeGroup
from echelon.comm.torch_dist.peers import Peers
from echelon.comm.world import World
from echelon.diagnosis.flight_recorder import VARIABLE, FlightRecorder, Phase
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import RankFailed
from echelon.process.environment import JobEnvironment
from tests.processes import free_port

# The server imports torch once; a rank is then a fork of it, which starts in milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tests.comm.gloo_ranks"])

START_S = 30.0  # on a busy machine some starts take seconds
END_S = 110.0  # after this, ranks are killed: a test has 120 s


class Died(Exception):
    """A rank's process ended without a result."""


def run_gloo(
    fn: Callable[..., Any], ranks: int, *, args: Sequence[Any] = (), **options: Any
) -> list[Any]:
    """Call ``fn(world, *args)`` on every rank; results in rank order, or the first failure."""
    outcomes = gloo_outcomes(fn, ranks, args=args, **options)
    # As ec.run does: what a rank raised itself comes before what others heard of it.
    by_cause = sorted(
        enumerate(outcomes), key=lambda item: (isinstance(item[1][0], RankFailed), item[1][1])
    )
    for rank, (outcome, _) in by_cause:
        if isinstance(outcome, BaseException):
            outcome.add_note(f"raised on rank {rank} of {ranks}")
            raise outcome
    return [outcome for outcome, _ in outcomes]


def gloo_outcomes(
    fn: Callable[..., Any],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    timeout: float = 20.0,
    check: bool = False,
    native: bool = False,
) -> list[tuple[Any, int]]:
    """What each rank returned, or the exception that ended it, and in which order they ended.

    Args:
        timeout: seconds that a rank waits for others, once all have started.
        check: compare calls.
        native: use the engine's own collectives, as on NCCL.
    """
    recorder = FlightRecorder.create(ranks)
    try:
        return start(
            _in_world,
            ranks,
            (fn, ranks, free_port(), tuple(args), timeout, check, native, recorder.path),
        )
    finally:
        recorder.close()


def gloo_errors(fn: Callable[..., Any], ranks: int = 3, **options: Any) -> list[Any]:
    """What each rank returned, or the exception that ended it, in rank order."""
    return [outcome for outcome, _ in gloo_outcomes(fn, ranks, **options)]


def start(main: Callable[..., Any], ranks: int, args: tuple[Any, ...]) -> list[tuple[Any, int]]:
    """Call ``main(rank, *args)`` in a process for each rank; returns as ``gloo_outcomes``."""
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(ranks):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(target=_send_outcome, args=(sender, main, rank, args))
        process.start()
        sender.close()
        pipes[receiver] = rank
        processes.append(process)
    outcomes: dict[int, tuple[Any, int]] = {}
    try:
        while pipes:
            ready = wait(list(pipes), timeout=END_S)
            if not ready:
                raise TimeoutError(f"ranks {sorted(pipes.values())} did not end")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                outcomes[pipes.pop(pipe)] = (_read(pipe), len(outcomes))
                pipe.close()
    finally:
        for process in processes:
            process.join(0 if pipes else 10)
            if process.is_alive():
                process.kill()
                process.join()
    for rank, process in enumerate(processes):
        outcome, place = outcomes[rank]
        if isinstance(outcome, Died):
            outcome.add_note(f"exit code {process.exitcode}")
        if process.exitcode != 0 and not isinstance(outcome, BaseException):
            outcomes[rank] = (Died(f"exit code {process.exitcode} after {outcome!r}"), place)
    return [outcomes[rank] for rank in range(ranks)]


def _read(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return Died("no result")


def _send_outcome(
    pipe: Connection, main: Callable[..., Any], rank: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        result = main(rank, *args)
    except BaseException as error:
        result = error
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()


def local_job(rank: int, size: int, port: int) -> JobEnvironment:
    """The environment of a rank of a job on this host."""
    return JobEnvironment(
        launcher="torchrun",
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        master_addr="127.0.0.1",
        master_port=port,
    )


def _in_world(
    rank: int,
    fn: Callable[..., Any],
    size: int,
    port: int,
    args: tuple[Any, ...],
    timeout: float,
    check: bool,
    native: bool,
    recorder: str,
) -> Any:
    job = local_job(rank, size, port)
    monitor = RankMonitor.of_job(job, {VARIABLE: recorder})
    if not native:
        device = torch.device("cpu")
        with connect(
            job, "gloo", device=device, timeout=START_S, check=check, monitor=monitor
        ) as world:
            _limit(world, timeout)
            monitor.set_phase(Phase.RUNNING)
            return fn(world, *args)
    try:
        group = _native_group(job, open_store(job, START_S), timeout, check, monitor)
        with World(group, backend="gloo", close=group.close) as world:
            return fn(world, *args)
    finally:
        dist.destroy_process_group()


def _limit(world: World, timeout: float) -> None:
    """Have ranks wait no longer than this, in the group of all and in those made from it."""
    group = world.group
    assert isinstance(group, PeerGroup)
    group._peers.timeout = timeout
    factory = group._connect.__self__  # type: ignore[attr-defined]
    group._connect = replace(factory, timeout=timeout)._make_on


def _native_group(
    job: JobEnvironment, store: dist.Store, timeout: float, check: bool, monitor: RankMonitor
) -> NativeGroup:
    """A group that uses gloo as it would use NCCL."""
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=limit)
    holds_store = job.rank == 0
    notices = Job(dist.PrefixStore("notices", store), monitor, job.size if holds_store else 0)

    def make(name: str, ranks: tuple[int, ...], device: torch.device) -> NativeGroup:
        rank = ranks.index(job.rank)
        engine = dist.group.WORLD
        if name != "world":
            at = dist.PrefixStore(f"group/{name}", store)
            engine = dist.ProcessGroupGloo(at, rank, len(ranks), limit)
        peers = None
        if check:
            side = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, len(ranks), limit)
            peers = Peers(side, rank, len(ranks), timeout)
        spec = GroupSpec(notices, name, ranks, device, timeout, make)
        return NativeGroup(spec, NativeEngine(engine, leave_running), peers)

    return make("world", tuple(range(job.size)), torch.device("cpu"))
