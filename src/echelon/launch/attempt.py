"""How the ranks of one attempt ended, and the lines that say so.

The agent that watched the ranks writes a line of JSON for its launcher. This module imports neither
torch nor anything that does, so that a launcher starts without that delay.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.failure_report import failure_report
from echelon.diagnosis.flight_recorder import RankStatus, where_of

# These ask a job to stop with time to save, so that it can be resumed.
# Those that this system has; simulated ranks, whose ends are told by the same rules, run anywhere.
_STOPS = {"SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"}
STOP_SIGNALS = tuple(each for each in signal.Signals if each.name in _STOPS)
FILE = "attempts.jsonl"  # where a job that nobody has launched keeps its attempts


class Outcome(Enum):
    """What the ends of all ranks mean for the job."""

    FINISHED = "every rank ended with code 0"
    RESUMABLE = "the ranks left on request, and can go on from what they have saved"
    STOPPED = "a signal ended the ranks"
    FAILED = "a rank failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt to run the ranks of a job to their end.

    With exit code 75 (``EX_TEMPFAIL``) a rank says that it has stopped on request and saved its
    state. It wants to be started again later, so such an attempt is never followed by another.

    Attributes:
        number: 1 for the first.
        most: attempts that the job may have.
        codes: exit codes by rank; negative for a signal.
        signaled: ranks that were asked to end, on request or because another one had failed.
        killed: ranks that did not end in time.
        raised: ranks that left a record of an exception of their own.
        noticed: ranks that left a record which only says that another rank failed.
        stop: the name of the signal that asked the job to stop; None: it was not asked.
        hurried: whether it was asked again, and ranks had less time than they were promised.
        statuses: what ranks had written into the flight recorder, by rank.
        held_up: a line for each rank that held up the others.
    """

    number: int
    most: int
    codes: Mapping[int, int]
    signaled: tuple[int, ...] = ()
    killed: tuple[int, ...] = ()
    raised: tuple[int, ...] = ()
    noticed: tuple[int, ...] = ()
    stop: str | None = None
    hurried: bool = False
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)
    held_up: tuple[str, ...] = ()

    @property
    def outcome(self) -> Outcome:
        """What this attempt means for the job."""
        codes = set(self.codes.values())
        if codes <= {0}:
            return Outcome.FINISHED
        if codes <= {0, os.EX_TEMPFAIL}:
            return Outcome.RESUMABLE
        if self.stop is not None and not self.raised:
            return Outcome.STOPPED
        return Outcome.FAILED

    @property
    def restarts(self) -> bool:
        """Whether another attempt follows."""
        asked = self.stop is not None or os.EX_TEMPFAIL in self.codes.values()
        return self.outcome is Outcome.FAILED and not asked and self.number < self.most

    @property
    def exit_code(self) -> int:
        """The exit code of the job if this is its last attempt.

        Example:
            >>> Attempt(number=1, most=1, codes={0: 75, 1: 75}, stop="SIGUSR1").exit_code
            75
            >>> Attempt(number=1, most=1, codes={0: 75, 1: -9}, stop="SIGTERM").exit_code
            143
            >>> Attempt(number=1, most=1, codes={0: 1, 1: 3}, noticed=(0,)).exit_code
            3
        """
        if self.outcome is Outcome.FINISHED:
            return 0
        if self.outcome is Outcome.RESUMABLE:
            return os.EX_TEMPFAIL
        if self.outcome is Outcome.STOPPED and self.stop is not None:
            return 128 + signal.Signals[self.stop]
        codes = (code for rank, code in sorted(self.codes.items()) if rank not in self.noticed)
        return next((code for code in codes if code > 0 and code != os.EX_TEMPFAIL), 1)

    def append(self, path: str | os.PathLike[str]) -> None:
        """Add this attempt to a file with those of its job."""
        with open(path, "a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> list[Attempt]:
        """All attempts of a job that have ended, in their order."""
        try:
            text = Path(path).read_text()
        except FileNotFoundError:
            return []  # the first has not ended yet
        whole, _, _ = text.rpartition("\n")  # what follows is being written
        return [_of(**json.loads(line)) for line in whole.splitlines()]


def _of(codes: dict[str, int], statuses: dict[str, Any], **facts: Any) -> Attempt:
    """The attempt that a line tells of: JSON has neither numbers as keys nor tuples."""
    tuples = ("signaled", "killed", "raised", "noticed", "held_up")
    facts |= {name: tuple(facts[name]) for name in tuples}
    return Attempt(
        codes={int(rank): code for rank, code in codes.items()},
        statuses={int(rank): RankStatus(**status) for rank, status in statuses.items()},
        **facts,
    )


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
    if attempt.killed and not attempt.raised and os.EX_TEMPFAIL in attempt.codes.values():
        left = [rank for rank, code in attempt.codes.items() if code == os.EX_TEMPFAIL]
        return [
            f"{_named(attempt.killed)} had not left {grace:g} s after {_named(left)} did with exit "
            f"code 75, and {_were(attempt.killed)} killed",
            "  ranks must decide together to stop: let them agree in a collective, after each step",
            "",
            *notes,
        ]
    ended = {
        rank: FailureRecord.of_process(
            rank,
            code,
            was_signaled=rank in attempt.signaled + attempt.killed,
            where=where_of(rank, attempt.statuses),
            log=logs.get(rank, ""),
        )
        for rank, code in attempt.codes.items()
        if code != 0
    }
    return failure_report({**ended, **records}.values(), notes, attempt.statuses)


def _were(ranks: Collection[int]) -> str:
    return "was" if len(ranks) == 1 else "were"


def _named(ranks: Collection[int]) -> str:
    """``rank 3``, or ``ranks 1, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"
