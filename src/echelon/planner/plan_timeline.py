"""The pipeline of a plan as a simulated schedule, with the times of its stages."""

from __future__ import annotations

from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.simulate import Simulation, simulate
from echelon.planner.layout_timer import LayoutTimer
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.simulated_step import stage_costs

_MOST_STEPS = 6000  # more are no picture


def drawn_microbatches(plan: PricedPlan) -> int:
    """Of how many microbatches a picture of the pipeline has room."""
    layout = plan.layout
    room = _MOST_STEPS // (2 * layout.pp * layout.chunks)
    return min(layout.microbatches, max(2 * layout.pp, room))


def simulated(plan: PricedPlan, microbatches: int | None = None) -> Simulation:
    """The schedule of a plan, in seconds.

    Args:
        microbatches: of the step; None: those of the plan.
    """
    layout = plan.layout
    count = layout.microbatches if microbatches is None else microbatches
    stages = layout.pp * layout.chunks
    costs = stage_costs(LayoutTimer(plan.model, plan.cluster, plan.stack), layout)
    return simulate(schedule(layout.schedule_name, stages, count, layout.pp), costs)
