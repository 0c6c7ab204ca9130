"""The pipeline of a plan as a simulated schedule, and the memory of its fullest rank along it."""

from __future__ import annotations

from typing import NamedTuple

from echelon.pipeline.schedules.dataflow import KEPT
from echelon.pipeline.schedules.simulate import Simulation, simulate
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.simulated_step import actions_of
from echelon.planner.step_time import LayoutTimer

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
    costs = LayoutTimer(plan.model, plan.cluster, plan.stack).stage_costs(plan.layout)
    return simulate(actions_of(plan.layout, microbatches), costs)


class MemoryMoment(NamedTuple):
    """What the rank has at one time of the step.

    Attributes:
        seconds: since the first rank began.
        gradients: bytes.
        activations: bytes.
    """

    seconds: float
    gradients: float
    activations: float


def memory_curve(plan: PricedPlan, simulation: Simulation) -> list[MemoryMoment]:
    """Gradients and activations of the rank that needs most; all else stays as it is.

    Activations grow while a forward runs and shrink while a backward does, by those of one
    microbatch in one stage. Gradients are there after the first backward; as activations shrink
    from then on if it comes after all forwards, they count from its begin then, as in ``moment``.
    """
    steps = simulation.timeline.of_rank(plan.memory.rank_stage)
    changes = [KEPT.get(step.item.kind, 0) for step in steps]
    alive, most = 0.0, 1.0
    for change in changes:
        alive += change
        most = max(most, alive)
    last_forward = max(place for place, change in enumerate(changes) if change > 0)
    each = plan.memory.activations / most
    moments, alive, gradients = [MemoryMoment(0.0, 0.0, 0.0)], 0.0, 0.0
    for place, (step, change) in enumerate(zip(steps, changes, strict=True)):
        is_first_backward = change < 0 and not gradients
        has_more_forwards = place < last_forward
        if is_first_backward and not has_more_forwards:
            moments.append(MemoryMoment(step.start, 0.0, alive * each))
            gradients = plan.memory.gradients
        moments.append(MemoryMoment(step.start, gradients, alive * each))
        alive += change
        moments.append(MemoryMoment(step.end, gradients, alive * each))
        if is_first_backward and has_more_forwards:
            gradients = plan.memory.gradients
            moments.append(MemoryMoment(step.end, gradients, alive * each))
    return moments
