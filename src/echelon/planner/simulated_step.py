"""Times of steps with the pipeline simulated on the action lists of its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.simulate import simulate
from echelon.planner.layout import Layout
from echelon.planner.layout_timer import LayoutTimer
from echelon.planner.stage_time import blocks_of_stages, parts_of_block
from echelon.planner.step_time import StepTime, drift_of, exposed_message

_ROUNDS = 2  # of as many microbatches as there are ranks: they fill and empty a pipeline


def simulated_steps(
    timer: LayoutTimer, timed: Sequence[tuple[Layout, StepTime]]
) -> list[tuple[Layout, StepTime]]:
    """Layouts with the times of ``step_time``, whose bubbles become those of the simulation.

    Layouts that differ in nothing that a stage computes are simulated once.
    """
    bubbles: dict[object, float] = {}
    steps = []
    for layout, time in timed:
        if layout.pp > 1:
            costs = stage_costs(timer, layout)
            key = (layout.schedule_name, layout.microbatches, *map(tuple, costs.values()))
            if key not in bubbles:
                bubbles[key] = simulated_bubble(layout, costs)
            time = _with_bubble(timer, layout, time, bubbles[key])
        steps.append((layout, time))
    return steps


def simulated_bubble(layout: Layout, costs: Mapping[str, Sequence[float]]) -> float:
    """Seconds of a step, until all ranks have ended, besides what the slowest rank computes.

    Where there are many microbatches, a step with ``_ROUNDS`` of them for each rank is simulated,
    and each further round takes what the slowest rank computes. Interleaved stages of different
    length wait for each other in each round, too, so one with a round more is simulated, which says
    how long.
    """
    rest = layout.microbatches % layout.pp
    short = min(layout.microbatches, _ROUNDS * layout.pp + rest)
    bubble = _bubble(layout, costs, short)
    rounds = (layout.microbatches - short) // layout.pp
    if rounds and layout.schedule_name == "interleaved":
        bubble += rounds * (_bubble(layout, costs, short + layout.pp) - bubble)
    return max(0.0, bubble)


def _bubble(layout: Layout, costs: Mapping[str, Sequence[float]], microbatches: int) -> float:
    stages = layout.pp * layout.chunks
    actions = schedule(layout.schedule_name, stages, microbatches, layout.pp)
    simulation = simulate(actions, costs)
    return simulation.makespan - max(simulation.busy)


def _with_bubble(timer: LayoutTimer, layout: Layout, time: StepTime, bubble: float) -> StepTime:
    drift = drift_of(layout, timer.cluster, timer.stack)
    return replace(time, bubble=bubble, other=time.other + (bubble - time.bubble) * drift)


def stage_costs(timer: LayoutTimer, layout: Layout) -> dict[str, list[float]]:
    """Seconds of one microbatch in each stage, by the names of ``simulate``.

    A forward has the message that comes in, a backward that which goes back, and the last stage the
    head.
    """
    rings = timer.table.rings(layout)
    parts = parts_of_block(layout, timer.table.block(layout, rings))
    head = timer.table.head(layout).total / 3  # a backward has two products for one of a forward
    hop = exposed_message(timer.model, layout, timer.cluster, timer.stack, rings)
    counts = blocks_of_stages(timer.model.layers, layout.pp * layout.chunks)
    costs = {}
    for name, seconds, message in zip("FIW", parts, (hop, hop, 0.0), strict=True):
        costs[name] = [count * seconds + message for count in counts]
        costs[name][-1] += head
    return costs
