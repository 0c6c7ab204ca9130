"""Start ranks and collect what they return; find the world a script was started in."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from echelon.checks import integer, positive
from echelon.comm import shm
from echelon.comm.streams import is_cpu, local_device
from echelon.comm.threads.exit_handlers import guarded_exit
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.threads.rank_globals import own_globals
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.comm.world import DEFAULT_TIMEOUT_S, World
from echelon.diagnosis.exit_guard import (
    ends_process,
    error_file,
    install_failure_record,
    outlive_termination,
    start_exit_guard,
)
from echelon.diagnosis.flight_recorder import Phase
from echelon.diagnosis.rank_monitor import RankMonitor, StepCounter
from echelon.diagnosis.stragglers import StragglerRule
from echelon.errors import ArgumentError, WorldError
from echelon.launch.processes import call, run_processes
from echelon.process import time_limits
from echelon.process.background_threads import run_in_background
from echelon.process.environment import JobEnvironment, environment, timeout_wanted
from echelon.process.main_thread import serve, serving

POLL_S = 0.1  # how often the thread that waits for simulated ranks looks what they want
MOST_RANKS = 1 << 16  # of one machine; more is a mistake
BACKENDS = ("shm", "gloo", "nccl", "mpi", "ucc", "xccl")

_current = threading.local()


def run(
    fn: Callable[..., Any],
    ranks: int,
    world: str = "threads",
    *,
    args: Sequence[Any] = (),
    timeout: float = DEFAULT_TIMEOUT_S,
    device: str | torch.device = "cpu",
) -> list[Any]:
    """Call ``fn(world, *args)`` on every rank and return the results in rank order.

    Args:
        fn: called with this rank's ``World``. For ``"processes"``, it and its results are copied
            from one process to another, with their code if they cannot be imported there.
        ranks: how many.
        world: ``"threads"``: simulated ranks in this process; ``"processes"``: local processes
            over shared memory.
        timeout: seconds that a rank waits for others in one call before it raises.
        device: for threads, where all ranks live.

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
    if world == "threads":
        return _run_threads(fn, ranks, tuple(args), timeout, _device(device))
    if world == "processes":
        if device not in ("cpu", torch.device("cpu")):
            raise ArgumentError(
                f"processes share CPU memory, so device={device!r} needs torchrun and NCCL"
            )
        return run_processes(fn, ranks, tuple(args), timeout, _enter)
    raise ArgumentError(f"unknown world {world!r:.80}: use 'threads' or 'processes'")


def _device(device: str | torch.device) -> torch.device:
    """The device of that name, which is there."""
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
    world: World | None = getattr(_current, "world", None)
    return world if world is not None and world.is_open else None


def _enter(world: World) -> None:
    """Make ``world`` what ``init`` returns on this thread, and count the steps of this rank."""
    _current.world = world
    world.steps.count()


def _run_threads(
    fn: Callable[..., Any], ranks: int, args: tuple[Any, ...], timeout: float, device: torch.device
) -> list[Any]:
    thread_world = ThreadWorld(ranks, timeout)
    results: list[Any] = [None] * ranks
    dtype = torch.get_default_dtype()

    def rank_main(rank: int) -> None:
        try:
            # Backward runs on the rank's own thread, or hooks of several ranks would queue behind
            # one another.
            with own_globals(dtype), torch.autograd.set_multithreading_enabled(False):
                thread_world.enter(rank)
                group = ThreadGroup(thread_world, rank, range(ranks), device=device)
                world = World(
                    group,
                    backend="threads",
                    close=lambda error: _leave(thread_world, rank, error),
                    steps=StepCounter(thread_world.sightings[rank].note_step),
                )
                _enter(world)
                results[rank] = call(fn, world, args)
                world.close()
        except BaseException as error:
            thread_world.fail(rank, error)

    threads: list[threading.Thread] = []
    with guarded_exit(timeout), serving():
        try:
            for rank in range(ranks):  # within the try: one may run, and wait, before the last
                threads.append(run_in_background(f"rank {rank}", rank_main, rank))
            _await_threads(thread_world, threads)
        except BaseException as error:  # Ctrl-C: free the ranks before we leave
            thread_world.fail(-1, error)
            raise
        if thread_world.failure is not None:
            _raise_first(thread_world, threads)
    return results


def _await_threads(thread_world: ThreadWorld, threads: Sequence[threading.Thread]) -> None:
    """Return when all ranks have ended, or one has failed.

    Raises:
        CommTimeout: a rank does not follow those that have left.
    """
    rule = StragglerRule(thread_world.timeout)
    while thread_world.failure is None:
        alive = [thread for thread in threads if thread.is_alive()]
        if not alive:
            return
        _join(alive[0], POLL_S)
        signs = {
            rank: thread_world.sign(rank, thread in alive) for rank, thread in enumerate(threads)
        }
        if late := rule.late(signs):
            names = ", ".join(threads[rank].name for rank in late)
            error = thread_world.straggler_error(late)
            error.add_note(f"still running outside communication, and left behind: {names}")
            raise error


def _join(thread: threading.Thread, seconds: float) -> None:
    """Wait for the end of a rank, and do what ranks ask of this thread."""
    thread.join(max(0.0, min(POLL_S, seconds)))
    serve()


def _leave(thread_world: ThreadWorld, rank: int, error: BaseException | None) -> None:
    """What a simulated rank does when it closes its world."""
    if error is None:
        thread_world.finish(rank)
    else:
        thread_world.fail(rank, error)


def _raise_first(thread_world: ThreadWorld, threads: Sequence[threading.Thread]) -> None:
    """Raise the first failure, once the other ranks have ended or had their time."""
    deadline = time.monotonic() + time_limits.NOTICE_IN_THREADS_S
    for thread in threads:
        while thread.is_alive() and time.monotonic() < deadline:
            _join(thread, deadline - time.monotonic())
    assert thread_world.failure is not None
    rank, error = thread_world.failure
    error.add_note(f"raised on rank {rank} of {thread_world.size}")
    if step := thread_world.sightings[rank].step:
        error.add_note(f"rank {rank} was at step {step}")
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        error.add_note(f"still running outside communication, and left behind: {', '.join(stuck)}")
    raise error


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
    world: World | None = getattr(_current, "world", None)
    if world is not None:
        if backend not in (None, world.backend):
            raise ArgumentError(
                f"this script runs in a world of {world.backend!r} already, so init({backend!r}) "
                "cannot choose another: leave the argument out"
            )
        return world
    job = environment(os.environ)
    if job is None or (job.size == 1 and backend is None):
        world = _alone(timeout, job)
    else:
        world = _join_job(job, backend, timeout, check)
    _close_at_exit(world)
    _enter(world)
    return world


def _alone(timeout: float, job: JobEnvironment | None) -> World:
    group = ThreadGroup(ThreadWorld(1, timeout), 0, [0], device=local_device(0))
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

    device = local_device(job.local_rank)
    if backend is None:
        backend = "shm" if job.one_host else "gloo"
        if not is_cpu(device):
            backend = "nccl"
    if backend == "shm":
        if not job.one_host:
            raise WorldError(
                f"backend 'shm' needs all ranks on one host, "
                f"but this host has {job.local_size} of {job.size}: "
                "use 'gloo' or 'nccl'"
            )
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
            steps=StepCounter(monitor.record_step),
        )
    return torch_dist.connect(
        job, backend, device=device, timeout=timeout, check=check, monitor=monitor
    )


def _close_at_exit(world: World) -> None:
    """Leave in good order when the script ends; tell the others of an exception that ends it."""
    if path := error_file():
        install_failure_record(path, world.rank, lambda: f"at step {world.step}")
        outlive_termination()
    before, owner = sys.excepthook, os.getpid()

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if ends_process(owner):
            world.close(error)
        before(kind, error, trace)

    def close() -> None:
        try:
            world.close()
        except BaseException as error:
            # The interpreter would print this and still exit with 0.
            sys.excepthook(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    sys.excepthook = tell
    atexit.register(close)
