"""Local processes as ranks: start them, collect results, name a failure, leave nothing behind.

Children are forked from a server that has torch imported already, so that starting them takes
milliseconds and no thread of the caller is copied. They die with the server, and it with the
caller.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from echelon.c10d import process_ranks
from echelon.c10d.process_watch import close_groups, leave_groups, use_monitor
from echelon.comm.shm.segment import Segment
from echelon.comm.shm.start import create_segments, join
from echelon.comm.torch_dist.stores import create_store_memory
from echelon.comm.world import World
from echelon.diagnosis.failure_record import FailureRecord, Reason, exit_text
from echelon.diagnosis.flight_recorder import FlightRecorder, Phase, RankStatus
from echelon.diagnosis.rank_monitor import RankMonitor, StepCounter
from echelon.diagnosis.root_cause import root_cause
from echelon.diagnosis.stuck_ranks import (
    ExitSign,
    ExitStage,
    StuckRankRule,
    sign_of,
    stuck_rank_error,
)
from echelon.errors import ArgumentError, CommError, RankFailed, WorldError
from echelon.launch import function_pickle
from echelon.launch.program import threads_per_rank
from echelon.launch.rank_function import call
from echelon.process import die_with_parent, time_limits
from echelon.process.fork_server import safe_path

_LOOK_S = 0.2  # how soon a rank that does not follow the others is noticed

_NAME = "rank "  # of our processes, before the number
_UNGUARDED = 79  # exit code of a rank that was asked to start ranks while it imported the script
_PRELOADED = ["echelon.process.fork_server", "echelon.launch.processes"]  # by the fork server
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
    """The traceback of another process, shown as the cause of its exception, and its record."""

    def __init__(self, text: str, record: FailureRecord) -> None:
        self.text, self.record = text, record
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
    context = multiprocessing.get_context("forkserver")
    children: list[BaseProcess] = []
    pipes: list[Connection] = []
    lifelines: list[Connection] = []  # nothing is ever sent; that we hold them is the message
    with ExitStack() as stack:
        recorder = FlightRecorder.create(ranks)
        stack.callback(recorder.close)
        store_path, store = create_store_memory()  # for torch.distributed, if the ranks use it
        stack.callback(os.close, store)
        job = _job_bytes(fn, args, timeout, enter, recorder.path, store_path)
        segments = create_segments(ranks)
        tokens = (segments[0].token, segments[1].token)
        for segment in segments:
            stack.callback(segment.unpublish)
        del segments, segment  # or the traceback of a failure would keep the memory
        stack.callback(_close, pipes)
        stack.callback(_close, lifelines)
        stack.callback(_end, children)
        start_fork_server()
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            lifeline, held = context.Pipe(duplex=False)
            lifelines.append(held)
            pipes.append(receiver)
            process = context.Process(
                target=_child,
                args=(rank, ranks, tokens, job, sender, lifeline),
                name=f"{_NAME}{rank}",
            )
            with function_pickle.importing_main_if_it_can():
                process.start()
            sender.close()
            lifeline.close()
            children.append(process)
        return _collect(children, pipes, recorder, timeout)


def _close(pipes: Sequence[Connection]) -> None:
    for pipe in pipes:
        pipe.close()


def _job_bytes(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    timeout: float,
    enter: Enter,
    recorder: str,
    store_path: str,
) -> bytes:
    """What a child is to do."""
    method = multiprocessing.get_start_method(allow_none=True)
    try:
        return function_pickle.dumps_job((fn, args, timeout, enter, method, recorder, store_path))
    except Exception as error:  # whatever the object at fault raises
        raise ArgumentError(
            f"{fn!r} and its arguments cannot be sent to other processes ({error}): make in the "
            "function what only one process can have, or use world='threads'"
        ) from error


def start_fork_server(*modules: str) -> None:
    """Start the server that ranks are forked from, unless it runs; it also imports ``modules``."""
    multiprocessing.set_forkserver_preload([*_PRELOADED, *modules])
    with safe_path():
        resource_tracker.ensure_running()  # whose start would unblock Ctrl-C again
    # The server inherits the mask, so Ctrl-C is not raised in its imports.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with safe_path():
            forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refuse_import() -> None:
    """Do not start ranks from a process that is still importing the script of its caller."""
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):  # as multiprocessing itself asks
        if process.name.startswith(_NAME):
            os._exit(_UNGUARDED)  # not a traceback of each rank: the caller raises, once
        raise ArgumentError(_ADVICE)


def _collect(
    children: Sequence[BaseProcess],
    pipes: Sequence[Connection],
    recorder: FlightRecorder,
    timeout: float,
) -> list[Any]:
    """The results, or the failure that came first; waits for the others a moment to learn more."""
    rule = StuckRankRule(timeout)
    results: dict[int, Any] = {}
    failures: dict[int, BaseException] = {}
    records: dict[int, FailureRecord] = {}
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
            _check_stuck_ranks(rule, recorder.statuses(), results)
        for rank in open_ranks:
            if ready & {pipes[rank], children[rank].sentinel}:
                outcome = _receive(children[rank], pipes[rank])
                if isinstance(outcome, BaseException):
                    failures[rank], records[rank] = outcome, _record_of(outcome, rank)
                else:
                    results[rank] = outcome[0]
        if failures and deadline is None:
            deadline = time.monotonic() + time_limits.NOTICE_S
        if deadline is not None and time.monotonic() >= deadline:
            break
    if failures:
        statuses = recorder.statuses()
        rank, error = _first(failures, records.values(), statuses)
        error.add_note(f"raised on rank {rank} of {len(children)}")
        if where := _where(rank, statuses.get(rank)):
            error.add_note(where)
        raise error
    return [results[rank] for rank in range(len(children))]


def _check_stuck_ranks(
    rule: StuckRankRule, statuses: Mapping[int, RankStatus], results: Mapping[int, Any]
) -> None:
    """Raise if a rank does not follow those that have returned.

    Raises:
        CommTimeout: names it, and what it does.
    """
    signs = {rank: sign_of(status) for rank, status in statuses.items()}
    signs |= dict.fromkeys(results, ExitSign(stage=ExitStage.ENDED))
    if late := rule.late(signs):
        error = stuck_rank_error(statuses, late)
        for rank in late:
            if where := _where(rank, statuses[rank]):
                error.add_note(where)
        raise error


def _where(rank: int, status: RankStatus | None) -> str:
    """How far a rank had come; empty where that is not known, or it has made no step."""
    if status is None:
        return ""
    if status.phase is Phase.STARTING:
        return f"rank {rank} was entering its world and had not called the function yet"
    return f"rank {rank} was at step {status.step}" if status.step else ""


def _receive(process: BaseProcess, pipe: Connection) -> tuple[Any] | BaseException:
    """The result of a rank as a 1-tuple, or what it raised, or how it died."""
    try:
        if not pipe.poll():  # the process has ended, and another one has its pipe
            raise EOFError
        record, payload, text = function_pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # OSError: it ended while it sent its result
        process.join(time_limits.EXIT_S)
        if process.exitcode is None:
            return WorldError(
                f"process {process.pid} runs, but has closed the pipe through which it sends its "
                "result: close no file descriptors that you have not opened"
            )
        if process.exitcode == _UNGUARDED:
            return ArgumentError(_ADVICE)
        return _Died(process.exitcode)
    if record is None:
        try:
            return (function_pickle.loads_result(payload),)
        except ArgumentError as error:
            return error
    try:
        failure: BaseException = function_pickle.loads(payload)
    except Exception as problem:  # an exception class that only the child can build
        message = f"a rank raised an exception that cannot be sent: {text} ({problem!r})"
        failure = WorldError(message)
    failure.__cause__ = _RemoteTraceback(text, record)
    return failure


class _Died(Exception):
    """A child ended without a word."""

    def __init__(self, exitcode: int) -> None:
        super().__init__(exitcode)
        self.exitcode = exitcode


def _record_of(failure: BaseException, rank: int) -> FailureRecord:
    """The record of a failure that has come from a child now."""
    if isinstance(failure, _Died):  # a child that ends by itself sends what it has raised
        return FailureRecord(rank=rank, reason=Reason.DIED, exit_code=failure.exitcode)
    if isinstance(failure.__cause__, _RemoteTraceback):  # what a rank handled is not sent with it
        return failure.__cause__.record
    return FailureRecord.of(failure, rank)


def _first(
    failures: Mapping[int, BaseException],
    records: Iterable[FailureRecord],
    statuses: Mapping[int, RankStatus],
) -> tuple[int, BaseException]:
    """The failure that caused the others, and its rank."""
    cause = root_cause(records)
    assert cause is not None, "each failure has a record"
    rank, error = cause.rank, failures[cause.rank]
    if not isinstance(error, _Died):
        return rank, error
    seen = next(
        (
            other.doing
            for other in failures.values()
            if isinstance(other, RankFailed) and other.failed_rank == rank
        ),
        "no communication with it",
    )
    how = exit_text(error.exitcode)
    if error.exitcode >= 0:
        how = f"ended with exit code {error.exitcode} before it returned"
    died = RankFailed(rank, how, seen)
    status = statuses.get(rank)
    died.add_note(_EARLY if status is None else f"its last call was {status.call or 'none'}")
    return rank, died


def _end(children: Sequence[BaseProcess]) -> None:
    """End what still runs, and wait for it as long as the kernel should need."""
    for process in children:
        if process.is_alive():
            process.kill()
    deadline = time.monotonic() + time_limits.KILL_S
    for process in children:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.exitcode is None:
            warnings.warn(
                f"{process.name} (process {process.pid}) was killed and its end is not known "
                f"after {time_limits.KILL_S:g} s: the kernel waits for a device or a disk on its "
                "behalf, or the server that started it is stopped",
                RuntimeWarning,
                stacklevel=4,
            )
        else:
            process.close()


def _child(
    rank: int,
    size: int,
    tokens: tuple[str, str],
    job: bytes,
    pipe: Connection,
    lifeline: Connection,
) -> None:
    """One rank: enter the world, call the function, send what it returned or raised."""
    die_with_parent.signal_on_death_of_parent(os.getppid(), signal.SIGKILL)
    die_with_parent.die_with_pipe(lifeline.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the caller, who ends us
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads_per_rank(size))
    try:
        fn, args, timeout, enter, method, recorder, store_path = function_pickle.loads(job)
        monitor = RankMonitor(FlightRecorder.open(recorder), rank, rank)
        monitor.set_timeout(timeout)
        # Or processes that the rank starts, as a DataLoader does, would be started our way.
        multiprocessing.set_start_method(method, force=True)
        segments = list(map(Segment.open, tokens))
        group = join(rank, size, segments, timeout=timeout, monitor=monitor)
        monitor.set_phase(Phase.RUNNING)
    except BaseException as error:
        _send_error(pipe, error, rank)
        return
    world = World(
        group,
        backend="shm",
        close=group.close,
        steps=StepCounter(monitor.record_step, monitor.step_rows),
    )
    try:
        enter(world)
        use_monitor(monitor)
        process_ranks.start_rank(rank, size, store_path, timeout)
        result = call(fn, world, args)
        world.close()
        leave_groups()
        payload = function_pickle.dumps((None, function_pickle.dumps_result(result, rank), ""))
    except BaseException as error:
        world.end_what_is_begun(error)
        group.close(error)
        close_groups(error)
        _send_error(pipe, error, rank)
    else:
        pipe.send_bytes(payload)


def _send_error(pipe: Connection, error: BaseException, rank: int) -> None:
    text = "".join(traceback.format_exception(error))
    try:
        payload = function_pickle.dumps(error)
        function_pickle.loads(payload)
    except Exception:  # the text still tells what happened
        payload = function_pickle.dumps(
            CommError(text) if isinstance(error, CommError) else WorldError(text)
        )
    pipe.send_bytes(function_pickle.dumps((FailureRecord.of(error, rank), payload, text)))
