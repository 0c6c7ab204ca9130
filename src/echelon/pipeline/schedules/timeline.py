"""When things happened on each rank: one type for what was simulated and what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from echelon.pipeline.schedules.ir import Item


class Step(NamedTuple):
    """One computation as it ran.

    Attributes:
        rank: where.
        item: what.
        start: when it began; in seconds, or in the unit of the costs.
        end: when it ended.
    """

    rank: int
    item: Item
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The steps of all ranks.

    Attributes:
        num_ranks: how many ranks there are, also those without a step.
        steps: in the order in which they begin on each rank.
    """

    num_ranks: int
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, num_ranks: int, steps: Iterable[Step]) -> Timeline:
        """A timeline of steps in any order, with the first of them at time 0.

        Example:
            >>> from echelon.pipeline.schedules.ir import parse_item
            >>> forward, backward = parse_item("0F0"), parse_item("0B0")
            >>> timeline = Timeline.of(1, [Step(0, backward, 7.5, 9), Step(0, forward, 7, 7.5)])
            >>> [(str(step.item), step.start, step.end) for step in timeline.steps]
            [('0F0', 0.0, 0.5), ('0B0', 0.5, 2.0)]
        """
        ordered = sorted(steps, key=lambda step: (step.start, step.end))
        zero = ordered[0].start if ordered else 0.0
        return cls(
            num_ranks,
            tuple(
                step._replace(start=float(step.start - zero), end=float(step.end - zero))
                for step in ordered
            ),
        )

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        if not self.steps:
            return 0.0
        return max(step.end for step in self.steps) - min(step.start for step in self.steps)

    def of_rank(self, rank: int) -> list[Step]:
        """The steps of one rank."""
        return [step for step in self.steps if step.rank == rank]
