"""``RefusedPlan``: a plan that does not fit, with the rank, the moment and the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.ir import BACKWARD, FORWARD, WEIGHT
from echelon.planner.layout import Layout
from echelon.planner.plan_options import layout_text
from echelon.planner.stage_schedule import WITHOUT_CLOSED_FORM, microbatches_under_way
from echelon.planner.step_memory import StepMemory

_MOST_CATEGORIES = 3
_ROUNDS = 3  # of as many microbatches as there are ranks: by then each has had its peak


@final
@dataclass(frozen=True, kw_only=True)
class RefusedPlan:
    """A plan that needs more memory than there is.

    Attributes:
        layout: the degrees of all axes.
        memory: of the rank that needs most, in bytes.
        limit: bytes that may be allocated on one device.
    """

    layout: Layout
    memory: StepMemory
    limit: float

    @property
    def rank(self) -> int:
        """The first rank that needs so much; the others of its stage do, too."""
        return self.memory.rank_stage * (self.layout.num_ranks // self.layout.pp)

    @property
    def moment(self) -> str:
        """When it needs so much."""
        return peak_moment(self.layout, self.memory.rank_stage)

    @property
    def nbytes(self) -> float:
        """What it would have allocated in that moment."""
        return self.memory.total

    def largest(self) -> str:
        """Its largest categories, in GiB."""
        sizes = sorted(self.memory.categories().items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {size / 2**30:.1f}" for name, size in sizes[:_MOST_CATEGORIES])

    def __str__(self) -> str:
        return (
            f"{layout_text(self.layout)}: rank {self.rank} would have "
            f"{self.nbytes / 2**30:.2f} GiB {self.moment} ({self.largest()}), of "
            f"{self.limit / 2**30:.2f} GiB"
        )


def peak_moment(layout: Layout, stage: int) -> str:
    """When a rank of a stage has most: with all that it keeps under way, and gradients there.

    Gradients are there from the first backward on, so the first such moment is the end of the
    forward after it, or the last backward's begin if no forward is left.

    Example:
        >>> peak_moment(Layout(pp=4, microbatches=8), 0)
        'after forward 5 of 8'
        >>> peak_moment(Layout(microbatches=1), 0)
        'in backward 1 of 1'
    """
    num_forwards = layout.microbatches * layout.chunks
    under_way = int(microbatches_under_way(layout, stage))
    if layout.schedule_name in WITHOUT_CLOSED_FORM:
        return f"after forward {_forwards_at_peak(layout, stage)} of {num_forwards}"
    if under_way < num_forwards:
        return f"after forward {under_way + 1} of {num_forwards}"
    return f"in backward 1 of {num_forwards}"


def _forwards_at_peak(layout: Layout, rank: int) -> int:
    """How many forwards a rank has run when it first has gradients and most activations.

    Where it never has both, when it first has most activations.
    """
    microbatches = min(layout.microbatches, _ROUNDS * layout.pp)
    stages = layout.pp * layout.chunks
    orders = schedule(layout.schedule_name, stages, microbatches, layout.pp).orders
    alive = forwards = without_gradients = 0
    for action in orders[rank]:
        if action.kind is FORWARD:
            alive, forwards = alive + 1, forwards + 1
            if alive == microbatches_under_way(layout, rank):
                if alive < forwards:
                    return forwards
                without_gradients = forwards
        elif action.kind in (WEIGHT, BACKWARD):
            alive -= 1
    return without_gradients
