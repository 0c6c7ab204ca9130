"""How the ranks of one attempt ended, as the agent that watched them tells its launcher.

This module imports neither torch nor anything that does, so that a launcher can read it at once.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from echelon.diagnosis.flight_recorder import RankStatus

_FILE = "attempts.jsonl"


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
        told: ranks that were told to end: by the stop signal, or because another one had failed.
        killed: ranks that did not end in time.
        raised: ranks that left a record of an exception of their own.
        noticed: ranks that left a record which only says that another rank failed.
        stop: the name of the signal that asked the job to stop; None: it was not asked.
        hurried: whether it was asked again, and ranks had less time than they were promised.
        entries: what ranks had written into the logbook, by rank.
    """

    number: int
    most: int
    codes: Mapping[int, int]
    told: tuple[int, ...] = ()
    killed: tuple[int, ...] = ()
    raised: tuple[int, ...] = ()
    noticed: tuple[int, ...] = ()
    stop: str | None = None
    hurried: bool = False
    entries: Mapping[int, RankStatus] = field(default_factory=dict)

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

    def append(self, folder: str | os.PathLike[str]) -> None:
        """Add this attempt to those of a job that keeps its logs in ``folder``."""
        with open(Path(folder) / _FILE, "a") as file:
            file.write(json.dumps(asdict(self)) + "\n")

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> list[Attempt]:
        """All attempts of a job that have ended, in their order."""
        try:
            text = (Path(folder) / _FILE).read_text()
        except FileNotFoundError:
            return []  # the first has not ended yet
        whole, _, _ = text.rpartition("\n")  # what follows is being written
        return [_of(**json.loads(line)) for line in whole.splitlines()]


def _of(codes: dict[str, int], entries: dict[str, Any], **facts: Any) -> Attempt:
    """The attempt that a line tells of: JSON has neither numbers as keys nor tuples."""
    facts |= {name: tuple(facts[name]) for name in ("told", "killed", "raised", "noticed")}
    return Attempt(
        codes={int(rank): code for rank, code in codes.items()},
        entries={int(rank): RankStatus(**entry) for rank, entry in entries.items()},
        **facts,
    )
