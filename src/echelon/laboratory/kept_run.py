"""What the black boxes of a run have kept: which of its steps can be replayed, and from where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, final

from echelon.errors import BlackboxCorrupt, BlackboxError, ReplayMismatch, StepNotKept
from echelon.errors.message_text import ranks_text
from echelon.laboratory import box_folder
from echelon.laboratory.box_folder import AttemptFolder, StretchFolder
from echelon.laboratory.job_facts import JobFacts
from echelon.laboratory.step_log import StepLog


@final
@dataclass(frozen=True, eq=False)
class KeptStretch:
    """A stretch of steps, as the ranks have left it.

    Attributes:
        folder: of the stretch.
        logs: of each rank that has one, by rank.
        damage: what is wrong with those that cannot be read.
    """

    folder: StretchFolder
    logs: Mapping[int, StepLog]
    damage: Sequence[BlackboxCorrupt] = ()

    @classmethod
    def read(cls, folder: StretchFolder, ranks: int) -> KeptStretch:
        """Read the logs of all ranks, without their payloads."""
        logs: dict[int, StepLog] = {}
        damage: list[BlackboxCorrupt] = []
        for rank in range(ranks):
            try:
                logs[rank] = StepLog(folder.log(rank))
            except FileNotFoundError:
                continue  # the rank has not come so far
            except BlackboxCorrupt as error:
                damage.append(error)
        return cls(folder, logs, damage)

    def last_step(self, rank: int) -> int:
        """The last step that a rank has begun without a gap; one before the first if none."""
        steps = self.logs[rank].steps() if rank in self.logs else []
        first = self.folder.first_step
        whole = [*takewhile(lambda pair: pair[0] == pair[1], enumerate(steps, start=first))]
        return first + len(whole) - 1


@final
@dataclass(frozen=True, eq=False)
class KeptSteps:
    """A step of a run, and all that is needed to compute it again.

    Attributes:
        run: the folder of the run.
        attempt: which start of the run it is of.
        facts: what has run.
        stretches: from the one with the checkpoint to the one with the step.
        step: the number of the step.
    """

    run: Path
    attempt: AttemptFolder
    facts: JobFacts
    stretches: Sequence[KeptStretch]
    step: int

    @property
    def first_step(self) -> int:
        """The step after the checkpoint."""
        return self.stretches[0].folder.first_step

    @property
    def checkpoint(self) -> Path:
        """The folder of the state before the first step."""
        return self.stretches[0].folder.checkpoint

    def begin(self, rank: int, step: int) -> dict[str, Any]:
        """What a rank has kept when a step began."""
        return self._log(rank, step).begin(step)

    def notes(self, rank: int, step: int) -> list[dict[str, Any]]:
        """The numbers that a rank has noted of a step."""
        return self._log(rank, step).notes(step)

    def error(self, rank: int) -> dict[str, Any] | None:
        """What has ended a rank in this very step; None if nothing is known."""
        log = self._log(rank, self.step)
        return log.error() if log.steps()[-1] == self.step else None

    def _log(self, rank: int, step: int) -> StepLog:
        stretch = [stretch for stretch in self.stretches if stretch.folder.first_step <= step][-1]
        return stretch.logs[rank]


@final
@dataclass(frozen=True, eq=False)
class KeptAttempt:
    """One start of a run, as its ranks have left it."""

    folder: AttemptFolder
    facts: JobFacts
    stretches: Sequence[KeptStretch] = field(default_factory=tuple)

    @classmethod
    def read(cls, folder: AttemptFolder) -> KeptAttempt:
        """Read what is there.

        Raises:
            BlackboxCorrupt: a file is damaged.
            OSError: a file cannot be read.
        """
        facts = JobFacts.read(folder.facts)
        stretches = [KeptStretch.read(stretch, facts.ranks) for stretch in folder.stretches()]
        return cls(folder, facts, stretches)

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """The first and the last index of stretches whose steps can be replayed in a row."""
        runs: list[tuple[int, int]] = []
        for i, stretch in enumerate(self.stretches):
            follows = i > 0 and self._last_step(i - 1) == stretch.folder.first_step - 1
            if stretch.folder.is_committed:
                runs.append((i, i))
            elif runs and runs[-1][1] == i - 1 and follows:
                runs[-1] = (runs[-1][0], i)
        return runs

    def ranges(self) -> list[tuple[int, int]]:
        """The first and the last step of each range that can be replayed."""
        ranges: list[tuple[int, int]] = []
        for start, stop in self.runs:
            first, last = self.stretches[start].folder.first_step, self._last_step(stop)
            if last >= first and ranges and ranges[-1][1] == first - 1:
                ranges[-1] = (ranges[-1][0], last)
            elif last >= first:
                ranges.append((first, last))
        return ranges

    def steps_to(self, step: int, run: Path) -> KeptSteps | None:
        """What is needed to replay a step; None if it was not kept."""
        for start, stop in reversed(self.runs):
            first, last = self.stretches[start].folder.first_step, self._last_step(stop)
            if first <= step <= last:
                stretches = self.stretches[start : stop + 1]
                needed = [stretch for stretch in stretches if stretch.folder.first_step <= step]
                return KeptSteps(run, self.folder, self.facts, needed, step)
        return None

    def why_not(self, step: int) -> str:
        """The ranks that have not kept a step although others have; empty if none has.

        Raises:
            BlackboxCorrupt: a file that may have the step is damaged.
        """
        before = [stretch for stretch in self.stretches if stretch.folder.first_step <= step]
        if not before:
            return ""
        if before[-1].damage:
            raise before[-1].damage[0]
        last = {rank: before[-1].last_step(rank) for rank in range(self.facts.ranks)}
        if max(last.values()) < step:
            return ""
        lack = [rank for rank, last_step in last.items() if last_step < step]
        return f"{ranks_text(lack)} did not begin it, or could not keep it" if lack else ""

    def lost_after(self, step: int) -> str:
        """Which later step some ranks have begun, and which ranks lack it; empty if none has."""
        last = {
            rank: max((stretch.last_step(rank) for stretch in self.stretches), default=0)
            for rank in range(self.facts.ranks)
        }
        newest = max(last.values())
        if newest <= step:
            return ""
        lack = ranks_text([rank for rank, last_step in last.items() if last_step < newest])
        damage = [str(error) for stretch in self.stretches for error in stretch.damage]
        return (
            f"step {step} is the last that was kept on all ranks. Some have begun step {newest}, "
            + "; ".join([f"which {lack} did not begin, or could not keep", *damage])
        )

    def end_of(self, rank: int) -> tuple[int, dict[str, Any]] | None:
        """The step in which an error has ended a rank, with its class and text; None if unknown."""
        logs = [stretch.logs[rank] for stretch in self.stretches if rank in stretch.logs]
        begun = [log for log in logs if log.steps()]
        error = begun[-1].error() if begun else None
        return None if error is None else (begun[-1].steps()[-1], error)

    def _last_step(self, i: int) -> int:
        """The last step that all ranks have begun in a stretch."""
        return min(self.stretches[i].last_step(rank) for rank in range(self.facts.ranks))


def kept_attempts(run: Path) -> list[KeptAttempt]:
    """What the black boxes have kept in the folder of a run, the newest attempt last.

    Raises:
        BlackboxError: there is none, or it is damaged or cannot be read.
    """
    root = run / box_folder.NAME
    try:
        folders = [folder for folder in box_folder.attempts(root) if folder.facts.exists()]
        kept = [KeptAttempt.read(folder) for folder in folders]
    except OSError as error:
        raise BlackboxError(f"cannot be read: {error.strerror}", error.filename) from error
    if not kept:
        raise BlackboxError("has no black box: make an ec.Blackbox in the training loop", run)
    return kept


def kept_batch(kept: KeptSteps, step: int) -> KeptSteps:
    """What has the batch of another step, which may be before another checkpoint.

    Raises:
        StepNotKept: it was not kept; says which are.
        ReplayMismatch: another number of ranks made it.
        BlackboxError: there is no black box, or it is damaged or cannot be read.
    """
    of_attempt = [each for each in kept_attempts(kept.run) if each.folder == kept.attempt]
    same_start = next(filter(None, (each.steps_to(step, kept.run) for each in of_attempt)), None)
    with_batch = same_start or kept_steps(kept.run, step)
    if (ranks := with_batch.facts.ranks) != kept.facts.ranks:
        pair = (f"of {kept.facts.ranks} ranks", f"of step {step}, on {ranks} ranks")
        raise ReplayMismatch(kept.run, {"batch": pair})
    return with_batch


def kept_steps(run: Path, step: int | None) -> KeptSteps:
    """What is needed to replay a step, or the last one of the newest attempt if it is None.

    Raises:
        StepNotKept: it was not kept; says which are.
        BlackboxError: there is no black box, or it is damaged or cannot be read.
    """
    attempts = kept_attempts(run)
    for attempt in reversed(attempts):
        ranges = attempt.ranges()
        wanted = ranges[-1][1] if step is None and ranges else step
        kept = None if wanted is None else attempt.steps_to(wanted, run)
        if kept is not None:
            return kept
    ranges = sorted({pair for attempt in attempts for pair in attempt.ranges()})
    if step is None:
        raise StepNotKept("no step was kept on all ranks", run, step=None, kept=ranges)
    reasons = [reason for attempt in attempts if (reason := attempt.why_not(step))]
    what = f"step {step} was not kept" + "".join(f": {reason}" for reason in reasons[-1:])
    raise StepNotKept(what, run, step=step, kept=ranges)
