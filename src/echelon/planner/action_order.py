"""``ActionOrder``: how long a schedule takes with many different costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Self, final

from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.ir import BACKWARD, FORWARD, INPUT, WEIGHT, Schedule

_NOTHING = -1  # the place of what an action waits for, if it waits for nothing
_NUM_KINDS = 4


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
        self._num_of = [0] * (_NUM_KINDS * self._num_stages)
        self._rank_of_stage = actions.placement
        self._num_ranks = actions.num_ranks
        self._walk(actions)

    @classmethod
    def of(cls, name: str, stages: int, microbatches: int, ranks: int) -> Self:
        """That of the schedule of a name."""
        return cls(schedule(name, stages, microbatches, ranks))

    def _walk(self, actions: Schedule) -> None:
        """Let each rank go on until it waits, and again when what it waits for is there."""
        stages, microbatches = actions.num_stages, actions.num_microbatches
        kinds = {FORWARD: 0, INPUT: 1, WEIGHT: 2, BACKWARD: 3}
        places = [_NOTHING] * (2 * stages * microbatches)  # of outputs, then of gradients
        waiting: dict[int, int] = {}  # a rank, by the value that it waits for
        next_action, last = [0] * actions.num_ranks, [_NOTHING] * actions.num_ranks
        ready = list(range(actions.num_ranks))
        while ready:
            rank = ready.pop()
            order = actions.orders[rank]
            while next_action[rank] < len(order):
                action = order[next_action[rank]].parts[0]
                kind, stage = kinds[action.kind], action.stage
                value = stage * microbatches + (action.microbatch or 0)
                needed = _NOTHING
                if kind == 0 and stage:
                    needed = value - microbatches
                elif kind != 0:
                    value += stages * microbatches
                    if kind != 2 and stage + 1 < stages:
                        needed = value + microbatches
                if needed != _NOTHING and places[needed] == _NOTHING:
                    waiting[needed] = rank
                    break
                self._after.append(places[needed] if needed != _NOTHING else _NOTHING)
                self._before.append(last[rank])
                self._costs.append(kind * stages + stage)
                self._num_of[kind * stages + stage] += 1
                last[rank] = len(self._costs) - 1
                next_action[rank] += 1
                if kind != 2:
                    places[value] = last[rank]
                    if value in waiting:
                        ready.append(waiting.pop(value))

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


@lru_cache(maxsize=64)
def action_order(name: str, stages: int, microbatches: int, ranks: int) -> ActionOrder:
    """As ``ActionOrder.of``; the last ones are kept."""
    return ActionOrder.of(name, stages, microbatches, ranks)
