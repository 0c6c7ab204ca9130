"""Start ranks and collect what they return; find the world a script was started in."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from echelon.checks import flag, integer, positive
from echelon.comm.lone.group import LoneGroup
from echelon.comm.streams import accelerator, local_device
from echelon.comm.threads.rank_rules import OneQueue, RankRules
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.comm.world import DEFAULT_TIMEOUT_S, World
from echelon.diagnosis.exit_guard import (
    error_file,
    guard_script,
    install_failure_record,
    start_exit_guard,
)
from echelon.diagnosis.flight_recorder import Phase
from echelon.diagnosis.rank_monitor import RankMonitor, StepCounter
from echelon.errors import ArgumentError, WorldError
from echelon.launch.cell_output import shown_in_cell
from echelon.launch.program import MOST_RANKS
from echelon.launch.rank_function import taking_world
from echelon.launch.simulated_ranks import SimulatedRanks
from echelon.process.environment import JobEnvironment, environment, timeout_wanted
from echelon.process.operating_system import require_linux
from echelon.process.this_rank import here

BACKENDS = ("shm", "gloo", "nccl", "mpi", "ucc", "xccl")


def run(
    fn: Callable[..., Any],
    ranks: int,
    world: str = "threads",
    *,
    args: Sequence[Any] = (),
    timeout: float = DEFAULT_TIMEOUT_S,
    device: str | torch.device = "cpu",
    rules: str | None = None,
) -> list[Any]:
    """Call ``fn(world, *args)`` on every rank and return the results in rank order.

    Simulated ranks take turns: one of them runs at a time, until it waits for others in a call of a
    group, and the order is the same in every run. Random streams (of torch, CUDA, Python, NumPy),
    the environment and other state of a process are each rank's own (``docs/worlds.md``).

    Args:
        fn: called with this rank's ``World``, or without it where it takes none, as a program of
            ``torch.distributed``. For ``"processes"``, it and its results are copied
            from one process to another, with their code if they cannot be imported there.
        ranks: how many.
        world: ``"threads"``: simulated ranks in this process; ``"processes"``: local processes
            over shared memory.
        timeout: seconds that a rank waits for others in one call before it raises. In turns, they
            are counted as if each rank had a core of its own.
        device: for threads, where all ranks live.
        rules: ``"nccl"``: simulated ranks wait for one another as over NCCL, and what hangs there
            raises here (``docs/laboratory/nccl-rules.md``).

    Raises:
        Exception: the first failure of a rank, with a note that names the rank.

    Example:
        >>> def main(world):
        ...     total = torch.tensor([world.rank])
        ...     world.group.all_reduce(total)
        ...     return total.item()
        >>> run(main, ranks=4)
        [6, 6, 6, 6]
    """
    if not callable(fn):
        raise ArgumentError(f"fn is {fn!r:.80}; give a function that takes a World")
    ranks = integer("ranks", ranks, low=1, high=MOST_RANKS)
    if not isinstance(args, list | tuple):
        raise ArgumentError(f"args is {args!r:.80}; give a tuple of what fn takes after the world")
    timeout = positive("timeout", timeout, threading.TIMEOUT_MAX)
    fn, args = taking_world(fn, len(args)), tuple(args)
    if world == "threads":
        thread_world = ThreadWorld(ranks, timeout, rank_rules(rules, ranks))
        return _run_threads(fn, thread_world, args, usable_device(device))
    if world == "processes":
        _refuse_for_processes(device, rules)
        return _run_processes(fn, ranks, args, timeout)
    raise ArgumentError(f"unknown world {world!r:.80}: use 'threads' or 'processes'")


def _refuse_for_processes(device: str | torch.device, rules: str | None) -> None:
    if rules is not None:
        raise ArgumentError(f"rules={rules!r:.80} is for simulated ranks: use world='threads'")
    if device not in ("cpu", torch.device("cpu")):
        raise ArgumentError(
            f"processes share CPU memory, so device={device!r} needs torchrun and NCCL"
        )


def _run_threads(
    fn: Callable[..., Any], thread_world: ThreadWorld, args: tuple[Any, ...], device: torch.device
) -> list[Any]:
    with (
        shown_in_cell(fn, thread_world.size, "threads") as rank_fn,
        SimulatedRanks(rank_fn, thread_world, args, device, enter) as simulated,
    ):
        simulated.follow()
    return simulated.results


def _run_processes(
    fn: Callable[..., Any], ranks: int, args: tuple[Any, ...], timeout: float
) -> list[Any]:
    require_linux("worlds of processes")
    from echelon.launch.processes import run_processes

    with shown_in_cell(fn, ranks, "processes") as rank_fn:
        return run_processes(rank_fn, ranks, args, timeout, enter)


def rank_rules(name: str | None, ranks: int) -> RankRules:
    """The rules of that name for so many simulated ranks; None: messages match by their tags."""
    if name not in (None, "nccl"):
        raise ArgumentError(f"rules is {name!r:.80}; use 'nccl', or None")
    return RankRules() if name is None else OneQueue(ranks)


def usable_device(device: str | torch.device) -> torch.device:
    """The device of that name, which is there."""
    if device is None:  # which torch takes for its default
        raise ArgumentError("device is None; give its name, such as 'cpu'")
    try:
        place = torch.empty(0, device=device).device
        torch.zeros(1, device=place).item()  # of which "meta" has none
        return place
    # Whatever this build of torch says.
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        raise ArgumentError(
            f"device is {device!r:.80}, which cannot be used here: {error}"
        ) from error


def entered() -> World | None:
    """The world that this thread is a rank of; None outside of any, and after its end."""
    world: World | None = here.world
    return world if world is not None and world.is_open else None


def enter(world: World) -> None:
    """Make ``world`` what ``init`` returns on this thread, and count the steps of this rank."""
    here.world = world
    world.steps.count()
    if world.size > 1:
        world.steps.measure()


def init(
    backend: str | None = None, *, timeout: float | None = None, check: bool | None = None
) -> World:
    """The world that this script was started in.

    Inside ``run`` and ``echelon run``: that world. Under torchrun or Slurm: NCCL where there is
    CUDA, shared memory where all ranks are on one host, else gloo. Otherwise a world of one rank.

    Args:
        backend: ``"shm"``, or any of ``torch.distributed``'s (``"gloo"``, ``"nccl"``, …), instead
            of the choice above.
        timeout: seconds that a rank waits for others in one call before it raises; None: those of
            ``ECHELON_TIMEOUT``, or else 300.
        check: compare every call of all ranks on backends of ``torch.distributed``; None: if
            ``ECHELON_CHECK=1``. Threads and shared memory always do.

    Raises:
        ArgumentError: an unknown backend, another than that of the world, or no time at all.
        StartMismatch: the ranks have other versions, numbers of torch threads or arguments.
        WorldError: the variables contradict each other or make no sense, or the ranks cannot reach
            each other.
        CommTimeout: some rank did not come.
    """
    if backend is not None and backend not in BACKENDS:
        raise ArgumentError(f"backend is {backend!r}; use one of {', '.join(BACKENDS)}, or None")
    if timeout is None:
        timeout = timeout_wanted(os.environ) or DEFAULT_TIMEOUT_S
    timeout = positive("timeout", timeout, threading.TIMEOUT_MAX)
    if check is not None:
        flag("check", check)
    world: World | None = here.world
    if world is not None:
        if backend not in (None, world.backend):
            raise ArgumentError(
                f"this script runs in a world of {world.backend!r} already, so init({backend!r}) "
                "cannot choose another: leave the argument out"
            )
        world.is_asked = True
        return world
    job = environment(os.environ)
    if job is None or (job.size == 1 and backend is None):
        world = _alone(timeout, job)
    else:
        world = _join_job(job, backend, timeout, check)
    # Leave in good order when the script ends; tell the others of an exception that ends it.
    close = world.close
    guard_script(world.rank, lambda: f"at step {world.step}", fail=close, leave=close)
    enter(world)
    return world


def _alone(timeout: float, job: JobEnvironment | None) -> World:
    group = LoneGroup(0, [0], device=local_device(0), timeout=timeout, shares_memory=True)
    if job is None:
        return World(group, backend="single")
    monitor = RankMonitor.of_job(job, os.environ)
    monitor.set_phase(Phase.RUNNING)
    return World(group, backend="single", steps=StepCounter(monitor.record_step))


def _join_job(
    job: JobEnvironment, backend: str | None, timeout: float, check: bool | None
) -> World:
    monitor = RankMonitor.of_job(job, os.environ)
    monitor.set_timeout(timeout)
    path = error_file()
    if path is None:
        world = _meet_job(job, backend, timeout, check, monitor)
    else:
        remove = install_failure_record(path, job.rank, lambda: "in echelon.init()")
        world = _meet_job(job, backend, timeout, check, monitor)
        remove()  # when the world could not be started, it tells so
    monitor.set_phase(Phase.RUNNING)
    start_exit_guard(monitor, timeout, world.close)
    return world


def _meet_job(
    job: JobEnvironment,
    backend: str | None,
    timeout: float,
    check: bool | None,
    monitor: RankMonitor,
) -> World:
    # Imported here: threads and processes need no torch.distributed, and it takes a second to
    # import.
    from echelon.comm import torch_dist

    if backend is None:
        backend = "shm" if job.one_host and sys.platform == "linux" else "gloo"
        kind = accelerator()
        if kind is not None:
            backend = torch_dist.backend_for(kind)
    if backend == "shm":
        require_linux("ranks over shared memory")
        if not job.one_host:
            raise WorldError(
                f"backend 'shm' needs all ranks on one host, "
                f"but this host has {job.local_size} of {job.size}: "
                "use 'gloo' or 'nccl'"
            )
        from echelon.comm import shm

        store = torch_dist.open_store(job, timeout)
        trusted = torch_dist.meet(store, job, backend, timeout, monitor).store
        name = f"world {job.attempt}"
        group = shm.connect(
            job.rank, job.size, trusted, timeout=timeout, name=name, monitor=monitor
        )
        return World(
            group,
            backend="shm",
            local_rank=job.local_rank,
            close=group.close,
            steps=StepCounter(monitor.record_step, monitor.step_rows),
        )
    # A rank on the CPU starts no context on a device, which takes half a gigabyte of it.
    device = torch.device("cpu")
    if backend != "gloo":
        device = local_device(job.local_rank, torch_dist.bound_device())
    return torch_dist.connect(
        job, backend, device=device, timeout=timeout, check=check, monitor=monitor
    )
