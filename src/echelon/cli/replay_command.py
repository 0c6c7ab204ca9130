"""``echelon replay``: computes a step of a run again, and shows what it did."""

from __future__ import annotations

import io
import pdb
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import TextIO

from echelon import checks
from echelon.cli.output import say
from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.failure_report import failure_report
from echelon.errors import BlackboxError
from echelon.errors.message_text import line_of, printable_line
from echelon.laboratory.kept_run import KeptAttempt, kept_attempts, kept_steps
from echelon.laboratory.rank_commands import EndedRanks
from echelon.laboratory.rank_frames import (
    RankView,
    Stack,
    stack_of_traceback,
    users_innermost,
)
from echelon.laboratory.rank_replay import RankReplay, StepReplayed
from echelon.laboratory.replay import Replay, replay_program
from echelon.laboratory.replayed_program import NamedProgram, command_of, no_program
from echelon.launch.rank_lines import WholeLines
from echelon.launch.run import entered


def show(
    run: Path,
    program: NamedProgram | None,
    *,
    step: int | None,
    rank: int | None,
    opens_pdb: bool,
    batch_of: int | None,
    anyway: bool,
) -> int:
    """Replay the step, and print how it went; returns 1 if that is not as in the run.

    Args:
        program: that each rank executes; None if none is named.
        step: to compute again; None for the last one.
        rank: whose output and error are shown; None for all, and the first that failed.
        opens_pdb: whether to open the debugger where the rank ended.
        batch_of: another step whose batch is taken; None for its own.
        anyway: also with another script or other versions.

    Raises:
        BlackboxError: the step cannot be replayed.
        ArgumentError: the program cannot be found, or there is no such rank.
    """
    run = run.absolute()
    if program is None:
        raise no_program(kept_attempts(run)[-1].facts)
    if rank is not None:
        checks.rank("--rank", rank, kept_steps(run, step).facts.ranks)
    if step is None:
        newest = kept_attempts(run)[-1]
        ranges = newest.ranges()
        if ranges and (lost := newest.lost_after(ranges[-1][1])):
            say(f"echelon: {lost}", err=True)
    with _output_of_step(rank):
        result = replay_program(run, program, step=step, batch_of=batch_of, anyway=anyway)
    rank = rank if rank is not None else result.first_failed
    if rank in result.errors:
        lines = failure_report([FailureRecord.of(result.errors[rank], rank)], [])
        say("\n".join(lines))
    say(result)
    if opens_pdb:
        _open_pdb(result, 0 if rank is None else rank)
    return 0 if result.same else 1


def show_kept(run: Path) -> int:
    """Print what was kept, attempt by attempt."""
    for attempt in kept_attempts(run):
        say(_attempt_text(attempt))
    return 0


def keep_newest(run: Path) -> int:
    """Keep the newest stretch of a run for good, which may still be running."""
    attempt = kept_attempts(run)[-1]
    if not attempt.stretches:
        raise BlackboxError("has no steps to keep yet", attempt.folder.path)
    folder = attempt.stretches[-1].folder
    folder.pin()
    say(f"{folder.path} is kept for good")
    return 0


def _attempt_text(attempt: KeptAttempt) -> str:
    facts = attempt.facts
    what = facts.function or facts.module or Path(facts.script).name or "no script"
    lines = [
        f"attempt {attempt.folder.number}: {printable_line(what)} on {facts.ranks} ranks over "
        f"{printable_line(facts.backend)}, "
        + ("ended in good order" if attempt.folder.is_closed else "runs, or has failed")
    ]
    ranges = [f"{first} to {last}" for first, last in attempt.ranges()]
    lines.append(f"  recorded program: {command_of(facts)}")
    lines.append(f"  steps that can be replayed: {', '.join(ranges) or 'none'}")
    folders = [stretch.folder for stretch in attempt.stretches]
    pinned = [folder.path.name for folder in folders if folder.is_pinned]
    marked = [folder.path.name for folder in folders if folder.is_not_finite]
    for what, names in (("kept for good", pinned), ("with numbers that are not finite", marked)):
        if names:
            lines.append(f"  {what}: {', '.join(names)}")
    for rank in range(facts.ranks):
        if (end := attempt.end_of(rank)) is not None:
            step, error = end
            text = str(error.get("text")).split("\n")[0]
            kind = printable_line(str(error.get("type")))
            lines.append(f"  rank {rank}: {kind} in step {step}: {printable_line(text)}")
    return "\n".join(lines)


# What ranks print --------------------------------------------------------------------------------


@contextmanager
def _output_of_step(rank: int | None) -> Iterator[None]:
    """Show what ranks print in the step that is replayed, or only what ``rank`` prints."""
    output = sys.stdout
    sys.stdout = WholeLines(_OfStep(output, rank), tee=True)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stdout = output


class _OfStep(io.TextIOBase):
    """A stream that keeps what ranks print in other steps to itself."""

    def __init__(self, stream: TextIO, rank: int | None) -> None:
        self._stream, self._rank = stream, rank

    def write(self, text: str) -> int:
        """Write it, if this thread is a rank that is at the step."""
        world = entered()
        of_rank = None if world is None else RankReplay.of(world)
        if world is None or of_rank is None:
            return self._stream.write(text)
        if of_rank.is_at_step and self._rank in (None, world.rank):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream underneath."""
        self._stream.flush()


# The debugger ------------------------------------------------------------------------------------


class _ReplayDebugger(EndedRanks, pdb.Pdb):
    """pdb where a rank has ended, in the innermost frame of the user."""

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[Stack, int]:
        """The frames that are shown, and which of them is the current one."""
        stack, _ = super().get_stack(f, t)
        return stack, users_innermost(stack)


def _view(rank: int, end: BaseException) -> RankView:
    is_over = isinstance(end, StepReplayed)
    what = "is at the end of the step" if is_over else f"has raised {printable_line(line_of(end))}"
    return RankView(rank, stack_of_traceback(end.__traceback__), what)


def _open_pdb(result: Replay, rank: int) -> None:
    """Open the debugger in the innermost frame of the user where ``rank`` ended."""
    end = result.ends.get(rank)
    trace = None if end is None else end.__traceback__
    if trace is None:
        say(f"rank {rank} has no frames left to look at")
        return
    what = "the end of the step" if isinstance(end, StepReplayed) else f"its {type(end).__name__}"
    say(f"pdb of rank {rank}, at {what}; its other frames are up and down")
    debugger = _ReplayDebugger()
    debugger.ended = [_view(each, error) for each, error in sorted(result.ends.items())]
    debugger.stopped_rank = rank
    debugger.shows(rank)
    debugger.reset()
    debugger.interaction(None, trace)
