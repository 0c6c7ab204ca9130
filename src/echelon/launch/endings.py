"""From how an attempt ended to the lines that say so. Pure."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from echelon.diagnosis.failure_record import FailureRecord
from echelon.launch.attempt import Attempt, Outcome
from echelon.launch.failure_text import Exit, cause_text


def leaving_line(attempt: Attempt, grace: float) -> str:
    """The line for ranks that a signal ended, or that left on request.

    Args:
        grace: seconds that ranks had after the signal.
    """
    reason = f"{attempt.stop}: " if attempt.stop else ""
    if attempt.outcome is Outcome.RESUMABLE:
        return (
            f"{reason}all ranks have left to go on later: the same command resumes (exit code 75)"
        )
    if attempt.killed:
        time = "when it was asked again" if attempt.hurried else f"after {grace:g} s"
        return (
            f"{reason}{_named(attempt.killed)} had not left {time} and {_were(attempt.killed)} "
            "killed: what was not saved by then is lost"
        )
    left = [rank for rank, code in sorted(attempt.codes.items()) if code == os.EX_TEMPFAIL]
    return f"{reason}all ranks have ended" + (f", only {_named(left)} with code 75" if left else "")


def restart_lines(attempt: Attempt, failure: Sequence[str], log_dir: Path) -> list[str]:
    """The lines between an attempt that failed and the next one: at most three.

    Args:
        failure: as ``failure_lines`` tells it.
    """
    return [
        failure[0],
        f"attempt {attempt.number + 1} of {attempt.most} begins: all ranks start again; the output "
        f"of attempt {attempt.number} is in {log_dir}",
    ]


def failure_lines(
    attempt: Attempt,
    records: Mapping[int, FailureRecord],
    logs: Mapping[int, str],
    grace: float,
    notes: Sequence[str],
) -> list[str]:
    """At most 25 lines for an attempt that failed, the first of which names rank and cause.

    Args:
        records: what ranks wrote before they ended, by rank.
        logs: the standard error of each rank.
        grace: seconds that ranks had to leave once one had left with code 75.
        notes: lines for the end, such as where the logs are.
    """
    if attempt.most > 1:
        notes = [f"this was attempt {attempt.number} of {attempt.most}", *notes]
    if attempt.stop is not None:
        notes = [f"{attempt.stop} had asked the ranks to stop", *notes]
    left = {rank for rank, code in attempt.codes.items() if code == os.EX_TEMPFAIL}
    ended = attempt.told + attempt.killed
    exits = {rank: Exit(code, rank in ended) for rank, code in attempt.codes.items() if code != 0}
    others = {rank: exit for rank, exit in exits.items() if rank not in left}
    if left and attempt.killed and not attempt.raised:
        return [
            f"{_named(attempt.killed)} had not left {grace:g} s after {_named(left)} did with exit "
            f"code 75, and {_were(attempt.killed)} killed",
            "  ranks must decide together to stop: let them agree in a collective, after each step",
            "",
            *notes,
        ]
    if any(exit.own and rank not in records for rank, exit in others.items()):
        exits = others  # one that asks to be started again is not the cause
    return cause_text(records, exits, logs, "", notes, attempt.entries)


def _were(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _named(ranks: Collection[int]) -> str:
    """``rank 3``, or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
