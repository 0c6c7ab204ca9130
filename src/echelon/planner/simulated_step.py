"""Times of steps with the pipeline simulated on the action lists of its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from echelon.planner.action_order import action_order
from echelon.planner.layout import Layout
from echelon.planner.layout_timer import LayoutTimer
from echelon.planner.stage_schedule import WITHOUT_CLOSED_FORM
from echelon.planner.stage_time import costs_of_stages
from echelon.planner.step_time import StepTime, drift_of, exposed_message

_ROUNDS = 2  # of as many microbatches as there are ranks: they fill and empty a pipeline
# Their ranks wait for each other in each round, too.
_WAITING_IN_ROUNDS = ("interleaved", *WITHOUT_CLOSED_FORM)


def simulated_steps(
    timer: LayoutTimer, timed: Sequence[tuple[Layout, StepTime]]
) -> list[tuple[Layout, StepTime]]:
    """Layouts with the times of ``step_time``, whose bubbles become those of the simulation.

    Layouts that differ in nothing that a stage computes are simulated once for a timer.
    """
    return [(layout, simulated_time(timer, layout, time)) for layout, time in timed]


def simulated_time(timer: LayoutTimer, layout: Layout, time: StepTime) -> StepTime:
    """The time of one layout, as ``simulated_steps``."""
    if layout.pp == 1:
        return time
    costs = stage_costs(timer, layout)
    key = (layout.schedule_name, layout.microbatches, *map(tuple, costs.values()))
    if key not in timer.bubbles:
        timer.bubbles[key] = simulated_bubble(layout, costs)
    return _with_bubble(timer, layout, time, timer.bubbles[key])


def simulated_bubble(layout: Layout, costs: Mapping[str, Sequence[float]]) -> float:
    """Seconds of a step, until all ranks have ended, besides what the slowest rank computes.

    Where there are many microbatches, a step with ``_ROUNDS`` of them for each rank is simulated,
    and each further round takes what the slowest rank computes. Interleaved stages of different
    length wait for each other in each round, too, and so do those of schedules that save memory, so
    one with a round more is simulated, which says how long.
    """
    rest = layout.microbatches % layout.pp
    short = min(layout.microbatches, _ROUNDS * layout.pp + rest)
    bubble = _bubble(layout, costs, short)
    rounds = (layout.microbatches - short) // layout.pp
    if rounds and layout.schedule_name in _WAITING_IN_ROUNDS:
        bubble += rounds * (_bubble(layout, costs, short + layout.pp) - bubble)
    return max(0.0, bubble)


def _bubble(layout: Layout, costs: Mapping[str, Sequence[float]], microbatches: int) -> float:
    stages = layout.pp * layout.chunks
    return action_order(layout.schedule_name, stages, microbatches, layout.pp).bubble(costs)


def _with_bubble(timer: LayoutTimer, layout: Layout, time: StepTime, bubble: float) -> StepTime:
    drift = drift_of(layout, timer.cluster, timer.stack)
    return replace(time, bubble=bubble, other=time.other + (bubble - time.bubble) * drift)


def stage_costs(timer: LayoutTimer, layout: Layout) -> dict[str, list[float]]:
    """As ``costs_of_stages``, of a layout."""
    rings = timer.table.rings(layout)
    hop = exposed_message(timer.model, layout, timer.cluster, timer.stack, rings)
    block, head = timer.table.block(layout, rings), timer.table.head(layout).total
    return costs_of_stages(timer.model.layers, layout, block, head, hop)
