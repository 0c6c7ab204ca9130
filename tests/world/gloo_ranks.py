"""Ranks as processes of this host that talk over gloo, or over a c10d engine's own collectives."""

from __future__ import annotations

import multiprocessing
import pickle
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from echelon.world.base import World
from echelon.world.environment import JobEnvironment
from echelon.world.torch_dist import connect, open_store
from echelon.world.torch_dist.job import Job
from echelon.world.torch_dist.native import NativeGroup
from echelon.world.torch_dist.peers import Peers

# The server imports torch once; a rank is then a fork of it, which starts in milliseconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "tests.world.gloo_ranks"])

END_S = 60.0  # after this, ranks are killed


class Died(Exception):
    """A rank's process ended without a result."""


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def run_gloo(
    fn: Callable[..., Any], ranks: int, *, args: Sequence[Any] = (), **options: Any
) -> list[Any]:
    """Call ``fn(world, *args)`` on every rank; results in rank order, or the first failure."""
    outcomes = gloo_outcomes(fn, ranks, args=args, **options)
    for rank, (outcome, _) in sorted(enumerate(outcomes), key=lambda item: item[1][1]):
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
        timeout: seconds that a rank waits for others.
        check: compare calls.
        native: use the engine's own collectives, as on NCCL.
    """
    env = {"size": ranks, "local_size": ranks, "master_addr": "127.0.0.1", "launcher": "torchrun"}
    port = free_port()
    pipes: dict[Connection, int] = {}
    processes = []
    for rank in range(ranks):
        ours, theirs = _context.Pipe(duplex=False)
        job = JobEnvironment(rank=rank, local_rank=rank, master_port=port, **env)
        process = _context.Process(
            target=_rank_main, args=(fn, job, tuple(args), timeout, check, native, theirs)
        )
        process.start()
        theirs.close()
        pipes[ours] = rank
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
    finally:
        for process in processes:
            process.join(0 if pipes else 10)
            if process.is_alive():
                process.kill()
                process.join()
    for rank, process in enumerate(processes):
        outcome, place = outcomes[rank]
        if process.exitcode != 0 and not isinstance(outcome, BaseException):
            outcomes[rank] = (Died(f"exit code {process.exitcode} after {outcome!r}"), place)
    return [outcomes[rank] for rank in range(ranks)]


def _read(pipe: Connection) -> Any:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return Died("no result")


def _rank_main(
    fn: Callable[..., Any],
    job: JobEnvironment,
    args: tuple[Any, ...],
    timeout: float,
    check: bool,
    native: bool,
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    try:
        if native:
            group = _native_group(job, open_store(job, timeout), timeout, check)
            made = World(group, backend="gloo", close=group.close)
        else:
            made = connect(job, "gloo", device=torch.device("cpu"), timeout=timeout, check=check)
        with made as world:
            result = fn(world, *args)
    except BaseException as error:
        result = error
    if native and dist.is_initialized():
        dist.destroy_process_group()
    pipe.send_bytes(pickle.dumps(result))
    pipe.close()


def _native_group(
    job: JobEnvironment, store: dist.Store, timeout: float, check: bool
) -> NativeGroup:
    """A group that uses gloo as it would use NCCL."""
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.size, timeout=limit)
    holds_store = job.rank == 0
    notices = Job(dist.PrefixStore("notices", store), job.rank, job.size if holds_store else 0)

    def make(name: str, ranks: tuple[int, ...]) -> NativeGroup:
        rank = ranks.index(job.rank)
        engine = dist.group.WORLD
        if name != "world":
            at = dist.PrefixStore(f"group/{name}", store)
            engine = dist.ProcessGroupGloo(at, rank, len(ranks), limit)
        peers = None
        if check:
            side = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, len(ranks), limit)
            peers = Peers(side, rank, len(ranks), timeout)
        return NativeGroup(
            engine,
            lambda failed: None,
            notices,
            name,
            ranks,
            torch.device("cpu"),
            timeout,
            make,
            peers,
        )

    return make("world", tuple(range(job.size)))
