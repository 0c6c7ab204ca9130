"""Times of steps with the pipeline simulated on the action lists of its schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import final

from echelon.pipeline.schedules.dataflow import Values
from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.ir import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule
from echelon.pipeline.schedules.walk import walk
from echelon.planner.layout import Layout
from echelon.planner.step_time import LayoutTimer, StepTime

_NOTHING = -1  # the place of what an action waits for, if it waits for nothing
_KINDS = {FORWARD: 0, INPUT: 1, WEIGHT: 2, BACKWARD: 3}  # as bubble has their costs
_ROUNDS = 2  # of as many microbatches as there are ranks: they fill and empty a pipeline


def simulated_time(timer: LayoutTimer, layout: Layout, time: StepTime) -> StepTime:
    """The time of ``step_time`` with the bubble of the simulation.

    Layouts that differ in nothing that a stage computes are simulated once for a timer.
    """
    if layout.pp == 1:
        return time
    costs = timer.stage_costs(layout)
    key = (layout.schedule_name, layout.microbatches, *map(tuple, costs.values()))
    if key not in timer.bubbles:
        timer.bubbles[key] = simulated_bubble(layout, costs)
    bubble = timer.bubbles[key]
    other = time.other + (bubble - time.bubble) * timer.drift(layout)
    return replace(time, bubble=bubble, other=other)


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
    if rounds and layout.schedule_cost.waits:
        bubble += rounds * (_bubble(layout, costs, short + layout.pp) - bubble)
    return max(0.0, bubble)


def _bubble(layout: Layout, costs: Mapping[str, Sequence[float]], microbatches: int) -> float:
    stages = layout.pp * layout.chunks
    return action_order(layout.schedule_name, stages, microbatches, layout.pp).bubble(costs)


@lru_cache(maxsize=64)
def action_order(name: str, stages: int, microbatches: int, ranks: int) -> ActionOrder:
    """That of the schedule of a name; the last ones are kept."""
    return ActionOrder(schedule(name, stages, microbatches, ranks))


def actions_of(layout: Layout, microbatches: int | None = None) -> Schedule:
    """The actions of the pipeline of a layout.

    Args:
        microbatches: of the step; None: those of the layout.
    """
    count = layout.microbatches if microbatches is None else microbatches
    return schedule(layout.schedule_name, layout.pp * layout.chunks, count, layout.pp)


@final
class ActionOrder:
    """The actions of a schedule, each after all that it waits for.

    ``simulate`` says more, and walks over the schedule each time. Here the walk is done once, and
    each further set of costs takes one addition and one comparison for an action.
    """

    def __init__(self, actions: Schedule) -> None:
        self._num_stages = actions.num_stages
        self._costs: list[int] = []  # of each action, where its cost stands
        self._before: list[int] = []  # of each action, the place of the one before it on its rank
        self._after: list[int] = []  # of each action, the place of what another stage gives it
        self._num_of = [0] * (len(_KINDS) * self._num_stages)
        self._rank_of_stage = actions.placement
        self._num_ranks = actions.num_ranks
        self._walk(actions)

    def _walk(self, actions: Schedule) -> None:
        values, stages = Values(actions.num_stages, actions.num_microbatches), actions.num_stages
        places = [_NOTHING] * values.count
        last = [_NOTHING] * actions.num_ranks
        for rank, _, item, _ in walk(actions):
            action = item.parts[0]
            cost = _KINDS[action.kind] * stages + action.stage
            # What an action needs of its own stage, its rank has made before.
            needed, result = values.needed(action), values.result(action)
            self._after.append(places[needed[0]] if needed else _NOTHING)
            self._before.append(last[rank])
            self._costs.append(cost)
            self._num_of[cost] += 1
            last[rank] = len(self._costs) - 1
            if result is not None:
                places[result] = last[rank]

    def bubble(self, costs: Mapping[str, Sequence[float]]) -> float:
        """Seconds from the first start to the last end, besides what the slowest rank computes.

        Args:
            costs: seconds of one microbatch in each stage, of ``F``, ``I`` and ``W``.
        """
        whole = [i + w for i, w in zip(costs["I"], costs["W"], strict=True)]
        seconds = [*costs["F"], *costs["I"], *costs["W"], *whole]
        ends: list[float] = []
        append = ends.append
        for cost, before, after in zip(self._costs, self._before, self._after, strict=True):
            start = ends[before] if before >= 0 else 0.0
            if after >= 0 and ends[after] > start:
                start = ends[after]
            append(start + seconds[cost])
        busy = [0.0] * self._num_ranks
        for place, number in enumerate(self._num_of):
            busy[self._rank_of_stage[place % self._num_stages]] += number * seconds[place]
        return max(ends) - max(busy)
