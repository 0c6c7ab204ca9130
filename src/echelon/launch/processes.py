"""Local processes as ranks: start them, collect results, name a failure, leave nothing behind.

Children are forked from a server that has torch imported already, so that starting them takes
milliseconds and no thread of the caller is copied. They die with the server, and it with the
caller.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from echelon.comm.shm.start import create_segments, join
from echelon.comm.world import World
from echelon.diagnosis.failure_record import is_heard
from echelon.diagnosis.flight_recorder import FlightRecorder, Phase, RankStatus
from echelon.diagnosis.step_count import Steps
from echelon.diagnosis.stragglers import (
    ExitSign,
    ExitStage,
    StragglerRule,
    sign_of,
    straggler_error,
)
from echelon.diagnosis.watch import Watch
from echelon.errors import ArgumentError, CommError, CommTimeout, RankFailed, WorldError
from echelon.launch import function_pickle
from echelon.process.forks import ends_forks

# After one rank failed, how long the others may take to notice by themselves, in seconds.
GRACE_S = 1.0
_LOOK_S = 0.2  # how soon a rank that does not follow the others is noticed
_PR_SET_PDEATHSIG = 1

_NAME = "rank "  # of our processes, before the number
_UNGUARDED = 79  # exit code of a rank that was asked to start ranks while it imported the script
_EARLY = (  # Python itself imports the script, and prints what that raises
    "it had not entered its world: it was importing the script, and what it printed is on "
    "standard error"
)
_ADVICE = (
    "the script starts ranks while it is imported, and each rank imports it to find the function: "
    'put the call of run(..., world="processes") under `if __name__ == "__main__":`'
)

Enter = Callable[[World], None]


class _RemoteTraceback(Exception):
    """The traceback of another process, shown as the cause of its exception."""

    def __init__(self, text: str) -> None:
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        return f"\n{self.text}"


def run_processes(
    fn: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...],
    timeout: float,
    enter: Enter,
) -> list[Any]:
    """Call ``fn(world, *args)`` in ``ranks`` processes of this host; results in rank order.

    Args:
        enter: called in each child with its world before ``fn``.

    Raises:
        ArgumentError: ``fn`` or ``args`` cannot be sent to another process, or the script calls
            this while a rank imports it.
        Exception: the first failure of a rank, with a note that names the rank.
    """
    _refuse_import()
    method = multiprocessing.get_start_method(allow_none=True)
    logbook = FlightRecorder.create(ranks)
    try:
        job = function_pickle.dumps_job((fn, args, timeout, enter, method, logbook.path))
    except Exception as error:  # whatever the object at fault raises
        logbook.close()
        raise ArgumentError(
            f"{fn!r} and its arguments cannot be sent to other processes ({error}): make in the "
            "function what only one process can have, or use world='threads'"
        ) from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["echelon.process.fork_server", "echelon.launch.processes"])
    segments = create_segments(ranks)
    tokens = (segments[0].token, segments[1].token)
    children: list[BaseProcess] = []
    pipes: list[Connection] = []
    lifelines: list[Connection] = []  # nothing is ever sent; that we hold them is the message
    try:
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            lifeline, held = context.Pipe(duplex=False)
            process = context.Process(
                target=_child,
                args=(rank, ranks, tokens, job, theirs, lifeline),
                name=f"{_NAME}{rank}",
            )
            with function_pickle.importing_main_if_it_can():
                process.start()
            theirs.close()
            lifeline.close()
            lifelines.append(held)
            children.append(process)
            pipes.append(ours)
        return _collect(children, pipes, logbook, timeout)
    finally:
        _end(children)
        logbook.close()
        for pipe in (*pipes, *lifelines):
            pipe.close()
        for segment in segments:
            segment.unpublish()
        del segments, segment  # or the traceback of a failure would keep the memory


def _refuse_import() -> None:
    """Do not start ranks from a process that is still importing the script of its caller."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # as multiprocessing itself asks
        if process.name.startswith(_NAME):
            os._exit(_UNGUARDED)  # not a traceback of each rank: the caller raises, once
        raise ArgumentError(_ADVICE)


def call(fn: Callable[..., Any], world: World, args: tuple[Any, ...]) -> Any:
    """What ``fn(world, *args)`` returns; ``sys.exit(0)`` in it is a return of None.

    Raised in the caller of ``run``, it would end the whole script as if all had gone well.
    """
    try:
        with ends_forks():
            return fn(world, *args)
    except SystemExit as end:
        if end.code not in (None, 0):
            world.group.prepare_close()  # this rank has not failed: it leaves
            raise
        return None
    except BaseException as error:
        world.explain(error)
        raise


def _collect(
    children: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    logbook: FlightRecorder,
    timeout: float,
) -> list[Any]:
    """The results, or the failure that came first; waits for the others a moment to learn more."""
    rule = StragglerRule(timeout)
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    deadline: float | None = None
    while len(results) + len(failures) < len(children):
        open_ranks = [r for r in range(len(children)) if r not in results and r not in failures]
        seconds = _LOOK_S if deadline is None else max(0.0, deadline - time.monotonic())
        # A process that a rank has started may keep its pipe open after its death.
        ready = set(
            wait(
                [*(pipes[r] for r in open_ranks), *(children[r].sentinel for r in open_ranks)],
                seconds,
            )
        )
        if deadline is None and not ready:
            _check_stragglers(rule, logbook.entries(), results)
        for rank in open_ranks:
            if ready & {pipes[rank], children[rank].sentinel}:
                outcome = _receive(children[rank], pipes[rank])
                if isinstance(outcome, BaseException):
                    failures[rank] = outcome
                else:
                    results[rank] = outcome[0]
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() >= deadline:
            break
    if failures:
        entries = logbook.entries()
        rank, error = _first(failures, entries)
        error.add_note(f"raised on rank {rank} of {len(children)}")
        if place := _place(rank, entries.get(rank)):
            error.add_note(place)
        raise error
    return [results[rank] for rank in range(len(children))]


def _check_stragglers(
    rule: StragglerRule, entries: Mapping[int, RankStatus], results: Mapping[int, Any]
) -> None:
    """Raise if a rank does not follow those that have returned.

    Raises:
        CommTimeout: names it, and what it does.
    """
    signs = {rank: sign_of(entry) for rank, entry in entries.items()}
    signs |= dict.fromkeys(results, ExitSign(stage=ExitStage.ENDED))
    if late := rule.late(signs):
        error = straggler_error(entries, late)
        for rank in late:
            if place := _place(rank, entries[rank]):
                error.add_note(place)
        raise error


def _place(rank: int, entry: RankStatus | None) -> str:
    """How far a rank had come; empty where that is not known, or it has made no step."""
    if entry is None:
        return ""
    if entry.phase is Phase.STARTING:
        return f"rank {rank} was entering its world and had not called the function yet"
    return f"rank {rank} was at step {entry.step}" if entry.step else ""


def _receive(process: BaseProcess, pipe: Connection) -> tuple[Any] | BaseException:
    """The result of a rank as a 1-tuple, or what it raised, or how it died."""
    try:
        if not pipe.poll():  # the process has ended, and another one has its pipe
            raise EOFError
        kind, payload, text = function_pickle.loads(pipe.recv_bytes())
    except EOFError:
        process.join()
        if process.exitcode == _UNGUARDED:
            return ArgumentError(_ADVICE)
        return _Died(process.exitcode or 0)
    if kind == "result":
        return (function_pickle.loads(payload),)
    try:
        error: BaseException = function_pickle.loads(payload)
    except Exception as problem:  # an exception class that only the child can build
        error = WorldError(f"a rank raised an exception that cannot be sent: {text} ({problem!r})")
    error.__cause__ = _RemoteTraceback(text)
    return error


class _Died(Exception):
    """A child ended without a word."""

    def __init__(self, exitcode: int) -> None:
        super().__init__(exitcode)
        self.how = (
            f"was killed by {signal.Signals(-exitcode).name}"
            if exitcode < 0
            else f"ended with exit code {exitcode} before it returned"
        )


def _first(
    failures: dict[int, BaseException], entries: Mapping[int, RankStatus]
) -> tuple[int, BaseException]:
    """The failure that caused the others, and its rank."""
    for rank, error in failures.items():
        if isinstance(error, _Died):
            seen = next(
                (
                    e.doing
                    for e in failures.values()
                    if isinstance(e, RankFailed) and e.failed_rank == rank
                ),
                "no communication with it",
            )
            died = RankFailed(rank, error.how, seen)
            entry = entries.get(rank)
            died.add_note(_EARLY if entry is None else f"its last call was {entry.call or 'none'}")
            return rank, died
    for rank, error in failures.items():
        if not isinstance(error, RankFailed | CommTimeout) and not is_heard(error, rank):
            return rank, error
    for rank, error in failures.items():
        if not isinstance(error, RankFailed):
            return rank, error
    return next(iter(failures.items()))


def _end(children: Sequence[BaseProcess]) -> None:
    """End what still runs, and wait for it."""
    for process in children:
        if process.is_alive():
            process.kill()
    for process in children:
        process.join()
        process.close()


def _die_with(lifeline: Connection) -> None:
    """Have the kernel kill this process when nobody holds the other end of ``lifeline`` any more.

    The parent of this process is the fork server, which ends only when all its children have: they
    hold its own life line. So the death of the caller must reach us directly, even if we are
    stopped or in native code.
    """
    descriptor = lifeline.fileno()
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if lifeline.poll():  # it was let go of before we asked for the signal
        os.kill(os.getpid(), signal.SIGKILL)


def _child(
    rank: int,
    size: int,
    tokens: tuple[str, str],
    job: bytes,
    pipe: Connection,
    lifeline: Connection,
) -> None:
    """One rank: enter the world, call the function, send what it returned or raised."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _die_with(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the caller, who ends us
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    try:
        fn, args, timeout, enter, method, logbook = function_pickle.loads(job)
        watch = Watch(FlightRecorder.open(logbook), rank, rank)
        watch.limit(timeout)
        # Or processes that the rank starts, as a DataLoader does, would be started our way.
        multiprocessing.set_start_method(method, force=True)
        group = join(rank, size, tokens, timeout=timeout, watch=watch)
        watch.run()
    except BaseException as error:
        _send_error(pipe, error)
        return
    world = World(group, backend="shm", close=group.close, steps=Steps(watch.step))
    try:
        enter(world)
        result = call(fn, world, args)
        world.close()
        payload = function_pickle.dumps(("result", function_pickle.dumps(result), ""))
    except BaseException as error:
        group.close(error)
        _send_error(pipe, error)
    else:
        pipe.send_bytes(payload)


def _send_error(pipe: Connection, error: BaseException) -> None:
    text = "".join(traceback.format_exception(error))
    try:
        payload = function_pickle.dumps(error)
        function_pickle.loads(payload)
    except Exception:  # the text still tells what happened
        payload = function_pickle.dumps(
            CommError(text) if isinstance(error, CommError) else WorldError(text)
        )
    pipe.send_bytes(function_pickle.dumps(("error", payload, text)))
