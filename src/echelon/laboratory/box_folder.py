"""The folder of a black box: attempts of a run, and in each of them stretches of its steps.

::

    runs/a/blackbox/
      .lock                              held by the box that is at work
      attempt-0001/                      one for each start of the run
        job.json                         what has run: script, versions, number of ranks
        closed                           if the attempt has ended in good order
        stretch-000000001/                steps 1 to 100
          checkpoint/step-000000000/     the state before step 1, as ec.save writes it
          rank-00000.steps               the batches and random states of a rank
          pinned                         if somebody has asked to keep it
          not-finite                     if a number in it was not finite
        stretch-000000101/

A step is replayed from the newest committed checkpoint before it, which may be that of an earlier
stretch: the checkpoint of a stretch is written while its first steps run already.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

from echelon.checkpoint import files
from echelon.errors import BlackboxCorrupt
from echelon.process.atomic_files import is_folder, remove_folder

NAME = "blackbox"
FACTS = "job.json"
_ATTEMPT = re.compile(r"attempt-([0-9]{4,9})")
_STRETCH = re.compile(r"stretch-([0-9]{9})")
_PINNED, _NOT_FINITE, _CLOSED = "pinned", "not-finite", "closed"
_IN_STRETCH = re.compile(rf"checkpoint|rank-[0-9]{{5,9}}\.steps|{_PINNED}|{_NOT_FINITE}")
_IN_ATTEMPT = re.compile(rf"{re.escape(FACTS)}|{_CLOSED}|{_STRETCH.pattern}|\.{re.escape(FACTS)}.*")
_KEPT_FAILURES = 2  # attempts without an orderly end that the next ones leave


class StretchState(NamedTuple):
    """What decides whether a stretch may go."""

    first_step: int
    is_committed: bool
    is_pinned: bool = False
    is_not_finite: bool = False


def needless(stretches: Sequence[StretchState], keep: int) -> list[int]:
    """The first steps of stretches that nobody needs any more, from stretches in their order.

    Law: of the steps since the ``keep``-th newest committed checkpoint, of those in a pinned
    stretch, and of those in the ``keep`` newest stretches with a number that was not finite, each
    can still be replayed if it could before.

    Example:
        >>> needless([StretchState(step, True) for step in (1, 101, 201)], keep=2)
        [1]
        >>> needless([StretchState(1, True), StretchState(101, False, is_pinned=True)], keep=1)
        []
    """
    committed = [i for i, stretch in enumerate(stretches) if stretch.is_committed]
    oldest = committed[-keep] if len(committed) >= keep else 0
    needed = set(range(oldest, len(stretches)))
    marked = [i for i, stretch in enumerate(stretches) if stretch.is_not_finite][-keep:]
    for i in [*marked, *(i for i, stretch in enumerate(stretches) if stretch.is_pinned)]:
        start = max((j for j in committed if j <= i), default=0)
        needed |= set(range(start, i + 1))
    return [stretch.first_step for i, stretch in enumerate(stretches) if i not in needed]


@final
@dataclass(frozen=True)
class StretchFolder:
    """The folder of the steps that follow one checkpoint.

    Attributes:
        path: of the folder.
        first_step: the number of its first step.
    """

    path: Path
    first_step: int

    @property
    def checkpoint(self) -> Path:
        """Where the state before the first step is saved."""
        return self.path / "checkpoint"

    @property
    def is_committed(self) -> bool:
        """Whether this state is there."""
        return files.steps(self.checkpoint) == [self.first_step - 1]

    @property
    def is_pinned(self) -> bool:
        """Whether somebody has asked to keep it, or has put something of theirs there."""
        return (self.path / _PINNED).exists() or _has_others(self.path, _IN_STRETCH)

    @property
    def is_not_finite(self) -> bool:
        """Whether a number in it was not finite."""
        return (self.path / _NOT_FINITE).exists()

    def log(self, rank: int) -> Path:
        """The file of the steps of a rank."""
        return self.path / f"rank-{rank:05d}.steps"

    def pin(self) -> None:
        """Keep it for good."""
        (self.path / _PINNED).touch()

    def mark_not_finite(self) -> None:
        """Note that a number in it was not finite."""
        (self.path / _NOT_FINITE).touch()

    @property
    def state(self) -> StretchState:
        """What decides whether it may go."""
        return StretchState(self.first_step, self.is_committed, self.is_pinned, self.is_not_finite)


@final
@dataclass(frozen=True)
class AttemptFolder:
    """The folder of one start of a run.

    Attributes:
        path: of the folder.
        number: counts from 1.
    """

    path: Path
    number: int

    @property
    def facts(self) -> Path:
        """The file that says what has run."""
        return self.path / FACTS

    @property
    def is_closed(self) -> bool:
        """Whether it has ended in good order."""
        return (self.path / _CLOSED).exists()

    def close(self) -> None:
        """Note that it has ended in good order."""
        (self.path / _CLOSED).touch()

    def stretch(self, first_step: int) -> StretchFolder:
        """The stretch that begins with a step."""
        return StretchFolder(self.path / f"stretch-{first_step:09d}", first_step)

    def stretches(self) -> list[StretchFolder]:
        """All stretches, in the order of their steps."""
        numbers = (_number(_STRETCH, path) for path in self.path.iterdir() if is_folder(path))
        return [self.stretch(number) for number in sorted(n for n in numbers if n is not None)]

    @property
    def must_stay(self) -> bool:
        """Whether it has a pinned stretch, or something that no run has written."""
        return _has_others(self.path, _IN_ATTEMPT) or any(
            stretch.is_pinned for stretch in self.stretches()
        )

    def prune(self, keep: int) -> None:
        """Remove the stretches that are not needed any more."""
        for first_step in needless([stretch.state for stretch in self.stretches()], keep):
            remove_folder(self.stretch(first_step).path)


def attempts(root: Path) -> list[AttemptFolder]:
    """All attempts in the folder of a black box, in their order; none if there is no folder."""
    if not root.is_dir():
        return []
    numbers = (_number(_ATTEMPT, path) for path in root.iterdir() if is_folder(path))
    return [_attempt(root, number) for number in sorted(n for n in numbers if n is not None)]


def new_attempt(root: Path) -> AttemptFolder:
    """Make the folder of the next attempt, and remove earlier ones that nobody needs.

    Pinned stretches stay, and so do the two newest attempts that have failed, and what has
    something in it that no run has written.
    """
    earlier = attempts(root)
    failed = [attempt for attempt in earlier if not attempt.is_closed][-_KEPT_FAILURES:]
    for attempt in earlier:
        if attempt not in failed and not attempt.must_stay:
            remove_folder(attempt.path)
    attempt = _attempt(root, max((attempt.number for attempt in earlier), default=0) + 1)
    attempt.path.mkdir(parents=True)
    return attempt


def attempt_of(root: Path, name: str) -> AttemptFolder:
    """The attempt with the name that another rank has given."""
    number = _number(_ATTEMPT, Path(name))
    if number is None:
        raise BlackboxCorrupt(f"has no attempt {name!r}", root)
    return _attempt(root, number)


def _attempt(root: Path, number: int) -> AttemptFolder:
    return AttemptFolder(root / f"attempt-{number:04d}", number)


def _number(pattern: re.Pattern[str], path: Path) -> int | None:
    match = pattern.fullmatch(path.name)
    return None if match is None else int(match[1])


def _has_others(folder: Path, ours: re.Pattern[str]) -> bool:
    """Whether there is something in a folder that no run has written."""
    return any(ours.fullmatch(path.name) is None for path in folder.iterdir())
