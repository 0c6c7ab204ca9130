"""Simulated ranks of ``echelon run``: one thread runs the script for each rank."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.failure_report import MAX_LINES
from echelon.diagnosis.held_up import verdict
from echelon.diagnosis.step_rows import RankSteps
from echelon.diagnosis.stuck_ranks import END
from echelon.errors import ArgumentError, CommTimeout, DeadlockError, DebuggerQuit
from echelon.errors.message_text import say
from echelon.launch.attempt import Outcome, failure_lines
from echelon.launch.program import Program
from echelon.launch.rank_ends import RankEnd, attempt_of, is_own_end
from echelon.launch.rank_lines import WholeLines, printing_as
from echelon.launch.served_program import ALONE, has_torch_group
from echelon.process import time_limits
from echelon.process.environment import timeout_wanted
from echelon.process.process_end import end_now, exit_text_of

if TYPE_CHECKING:
    from echelon.comm.world import World
    from echelon.diagnosis.rank_time import RankTime


_Reader = Callable[[], tuple[CodeType, Mapping[str, Any]]]


def run_threads(
    program: Program,
    arguments: Sequence[str],
    ranks: int,
    timeout: float | None = None,
    *,
    tee: bool = False,
    rules: str | None = None,
    run_ranks: Callable[..., object] | None = None,
) -> int:
    """Run ``program`` once for each of ``ranks`` threads; the exit code.

    Each rank has its own ``__main__``, and its own modules of the program's folders; other modules
    are shared.

    Args:
        timeout: seconds that a rank waits for others in one call; None: as long as by default.
        tee: write the number of the rank before each line that it prints.
        rules: as of ``ec.run``.
        run_ranks: takes the arguments of ``ec.run`` that this gives, and runs the ranks.
    """
    sys.path.insert(0, program.folder())
    ends: list[RankEnd] = []
    times: list[tuple[int, RankTime]] = []
    try:
        read = _reader(program)
    except (ArgumentError, SyntaxError, ValueError) as error:
        return _fail(error, ends, ranks)
    sys.argv = [program.name, *arguments]
    # They bring torch; mistakes above need not wait for it.
    from echelon.comm.threads.exit_handlers import guard_exit
    from echelon.comm.threads.rank_modules import importing_for_themselves
    from echelon.comm.world import DEFAULT_TIMEOUT_S
    from echelon.launch.run import run

    wanted = timeout or timeout_wanted(os.environ)
    timeout = DEFAULT_TIMEOUT_S if timeout is None else timeout
    guard_exit(timeout)
    before = frozenset(threading.enumerate())  # of them, none is a rank of this run
    output, sys.stdout = sys.stdout, WholeLines(sys.stdout, tee)
    try:
        args = (read, ends, times, wanted)
        with importing_for_themselves(program.folder()):
            start = run_ranks or partial(run, rules=rules)
            start(_rank_main, ranks, args=args, timeout=timeout)
    except BaseException as error:
        return _leave(_ending(error, ends, ranks), before)
    finally:
        sys.stdout.flush()
        sys.stdout = output
    steps = [RankSteps.of(rank, rank_time.rows.numbers()) for rank, rank_time in times]
    for cost in verdict(steps):
        say(cost)
    return 0


def _reader(program: Program) -> _Reader:
    """What reads the program in each rank, which imports the packages of a module for itself."""
    if program.is_module:
        program.require_package()
        return program.read
    code, names = program.read()
    return lambda: (_copy_of(code), names)


def _copy_of(code: CodeType) -> CodeType:
    """Equal code of its own, by which ``torch.compile`` keeps what it has compiled for a rank."""
    constants = (_copy_of(each) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=tuple(constants))


def _rank_main(
    world: World,
    read: _Reader,
    ends: list[RankEnd],
    times: list[tuple[int, RankTime]],
    timeout: float | None,
) -> None:
    """Run the script as if it were the only one; ``echelon.init`` finds the world by the thread."""
    from echelon.comm.threads.rank_modules import main_names

    times.append((world.rank, world.steps.time))
    if timeout is not None:
        os.environ["ECHELON_TIMEOUT"] = f"{timeout:g}"  # that of this rank, for groups of torch
    else:
        os.environ.pop("ECHELON_TIMEOUT", None)  # they wait as long as with torchrun
    output = sys.stdout  # which the rank may replace for itself
    failure: BaseException | None = None
    with printing_as(world.rank):
        try:
            code, names = read()
            sys.argv[0] = names["__file__"]
            exec(code, main_names(names))
            has_met = world.is_asked or len(world.steps.time.arrivals) or has_torch_group()
            if not has_met and world.rank == 0 and world.size > 1 and world.step:
                say(ALONE.format(size=world.size))
        except BaseException as error:
            world.explain(error)
            failure = error
            raise
        finally:
            ends.append(RankEnd.of(world.rank, world.step, _last_call(world), failure))
            if isinstance(output, WholeLines):
                output.end()


def _last_call(world: World) -> str:
    """The last call that a rank issued, with position and place; empty if nobody has seen one."""
    from echelon.comm.threads.group import ThreadGroup

    if not isinstance(world.group, ThreadGroup):  # somebody else runs the ranks
        return ""
    call = world.group.thread_world.sightings[world.rank].call
    return "" if call is None else str(call)


def _ending(error: BaseException, ends: Sequence[RankEnd], ranks: int) -> int:
    """Print why the ranks have ended before their time; the exit code."""
    match error:
        case KeyboardInterrupt() if all(end.error is not error for end in ends):
            say("interrupted")
            return 130
        case DebuggerQuit():
            say(error)
            return 1
        case SystemExit() if is_own_end(attempt := attempt_of(ends, ranks)):
            if text := exit_text_of(error):
                say(text)
            return attempt.exit_code
    return _fail(error, ends, ranks)


def _fail(error: BaseException, ends: Sequence[RankEnd], ranks: int) -> int:
    """Print what happened; the exit code."""
    notes = [f"simulated ranks: {ranks}, threads of one process"]
    all_wait = all(end.record is None or end.record.is_disagreement for end in ends)
    if isinstance(error, DeadlockError) and all_wait:  # and it names their lines itself
        lines = [line[:200] for line in str(error).splitlines()]
        say(*lines[: MAX_LINES - 2], "", *notes)
        return 1
    attempt = attempt_of(ends, ranks)
    records = {end.rank: end.record for end in ends if end.record is not None}
    if all(end.error is not error for end in ends):
        missing = error.missing if isinstance(error, CommTimeout) and error.doing == END else ()
        first = next(iter(missing), 0)
        records.setdefault(first, replace(FailureRecord.of(error, first), stacks=""))
    logs = {end.rank: end.log for end in ends}
    say(*failure_lines(attempt, records, logs, 0.0, notes))
    return attempt.exit_code if attempt.outcome is Outcome.FAILED else 1


def _leave(code: int, before: frozenset[threading.Thread]) -> int:
    """Wait for the threads that came since ``before``; end the process here if one still computes.

    A thread that runs in torch while the interpreter is taken down would crash it.
    """
    # Python itself waits for those that are no daemons, as it does without ranks.
    ranks = [t for t in threading.enumerate() if t.daemon and t not in before]
    for thread in ranks:
        thread.join(time_limits.NOTICE_IN_THREADS_S / len(ranks))
    if any(thread.is_alive() for thread in ranks):
        end_now(code)
    return code
