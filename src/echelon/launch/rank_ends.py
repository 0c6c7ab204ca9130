"""How simulated ranks of ``echelon run`` have ended: the same facts that an agent of processes has.

So the sentences and the exit code are those of processes, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import final

from echelon.diagnosis.failure_record import FailureRecord
from echelon.diagnosis.flight_recorder import Phase, RankStatus
from echelon.launch.attempt import Attempt, Outcome
from echelon.process.process_end import exit_code_of, exit_text_of


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """How a rank has ended its script.

    Attributes:
        rank: in the job.
        step: optimizer steps that it had made.
        call: the last one that it issued, with position and place; empty if it issued none.
        error: what ended the script; None: it came to its last line.
        record: of an exception that ended it; None: it came to its end, or exited.
    """

    rank: int
    step: int
    call: str
    error: BaseException | None
    record: FailureRecord | None

    @classmethod
    def of(cls, rank: int, step: int, call: str, error: BaseException | None) -> RankEnd:
        """The end of a rank that has just come to it."""
        record = None
        if error is not None and not isinstance(error, SystemExit):
            record = replace(FailureRecord.of(error, rank, f"at step {step}"), stacks="")
        return cls(rank=rank, step=step, call=call, error=error, record=record)

    @property
    def code(self) -> int:
        """The exit code of a process whose script ends so."""
        if self.error is None:
            return 0
        return exit_code_of(self.error) if isinstance(self.error, SystemExit) else 1

    @property
    def log(self) -> str:
        """What Python prints of such an end, where it has no traceback."""
        return exit_text_of(self.error) if isinstance(self.error, SystemExit) else ""

    @property
    def status(self) -> RankStatus:
        """How far it had come."""
        return RankStatus(
            rank=self.rank,
            pid=os.getpid(),
            start_ticks=0,
            attempt=0,
            phase=Phase.RUNNING,
            step=self.step,
            call=self.call,
            waits_for=None,
            thread_id=0,
            native_id=0,
            stacks_fd=None,
        )


def attempt_of(ends: Collection[RankEnd], ranks: int) -> Attempt:
    """The attempt in which ranks ended so; those of which no end is known are left behind."""
    left_behind = tuple(sorted({*range(ranks)} - {end.rank for end in ends}))
    records = [end.record for end in ends if end.record is not None]
    return Attempt(
        number=1,
        most=1,
        codes=dict.fromkeys(left_behind, -signal.SIGTERM) | {end.rank: end.code for end in ends},
        signaled=left_behind,
        raised=tuple(record.rank for record in records if not record.follows),
        noticed=tuple(record.rank for record in records if record.follows),
        statuses={end.rank: end.status for end in ends},
    )


def is_own_end(attempt: Attempt) -> bool:
    """Whether the program has ended so on all ranks by itself, such as after wrong arguments."""
    is_agreed = len(set(attempt.codes.values())) == 1
    has_exited = not (attempt.raised or attempt.noticed or attempt.signaled)
    return attempt.outcome is not Outcome.FAILED or (is_agreed and has_exited)
