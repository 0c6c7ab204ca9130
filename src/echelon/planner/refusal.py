"""``RefusedPlan``: a plan that does not fit, with the rank, the moment and the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from echelon.pipeline.schedules.dataflow import KEPT
from echelon.planner.layout import Layout
from echelon.planner.plan_options import layout_text
from echelon.planner.simulated_step import actions_of
from echelon.planner.stage_schedule import microbatches_under_way
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
    if not layout.has_closed_form:
        return f"after forward {_forwards_at_peak(layout, stage)} of {num_forwards}"
    if under_way < num_forwards:
        return f"after forward {under_way + 1} of {num_forwards}"
    return f"in backward 1 of {num_forwards}"


def _forwards_at_peak(layout: Layout, rank: int) -> int:
    """How many forwards a rank has run when it first has gradients and most activations.

    Where it never has both, when it first has most activations.
    """
    microbatches = min(layout.microbatches, _ROUNDS * layout.pp)
    most = microbatches_under_way(layout, rank)
    alive = forwards = without_gradients = 0
    for action in actions_of(layout, microbatches).orders[rank]:
        change = KEPT.get(action.kind, 0)
        alive, forwards = alive + change, forwards + (change > 0)
        if change > 0 and alive == most:
            if alive < forwards:
                return forwards
            without_gradients = forwards
    return without_gradients
