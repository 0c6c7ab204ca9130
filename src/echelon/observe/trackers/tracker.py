"""What a tracker is, and the run that it tracks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class Tracker(Protocol):
    """Takes the values of a run. Any object with these three methods is one.

    All calls come from one thread, first ``config``, last ``close``.
    """

    def config(self, values: Mapping[str, object]) -> None:
        """Take the options of the run."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Take numbers by flat names such as ``train/loss``, after ``step`` steps."""

    def close(self) -> None:
        """End the run."""


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """The run that a tracker is opened for.

    Attributes:
        folder: where the run writes.
        name: of the run; its ranks have it in common.
        rank: whose values these are; None where the run is tracked as a whole.
    """

    folder: Path
    name: str
    rank: int | None = None

    @property
    def title(self) -> str:
        """The name of the run, with the rank if each rank is tracked."""
        return self.name if self.rank is None else f"{self.name}-rank-{self.rank}"
