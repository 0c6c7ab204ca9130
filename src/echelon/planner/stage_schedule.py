"""What the schedule of a pipeline costs without a simulation: its bubble, and what a rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from echelon.errors import ArgumentError
from echelon.planner.layout import Layout
from echelon.planner.schedule_cost import SCHEDULES

_SEARCHED_CHUNKS = (1, 2, 4)


def schedule_choices(pp: int, layers: int, microbatches: int) -> list[tuple[str | None, int]]:
    """The schedules and chunks that a search looks at, the simplest first.

    Example:
        >>> schedule_choices(pp=2, layers=4, microbatches=2)
        [(None, 1), (None, 2), ('zb-h1', 1), ('v-min', 2)]
    """
    if pp == 1:
        return [(None, 1)]
    return [
        (name if cost.is_named else None, chunks)
        for name, cost in SCHEDULES.items()
        for chunks in cost.chunks
        if chunks in _SEARCHED_CHUNKS and layers >= pp * chunks and microbatches >= cost.rounds * pp
    ]


def bubble_of_a_stage(layout: Layout, forward: float, inputs: float, weights: float) -> float:
    """Seconds that a rank waits for each other stage in a step, from the first start to the last
    end.

    Args:
        forward: seconds of a forward of one microbatch in the stages of a rank.
        inputs: seconds of the gradients of its inputs.
        weights: seconds of the gradients of its weights.

    Example:
        >>> bubble_of_a_stage(Layout(pp=4, microbatches=8), 1.0, 1.0, 1.0)
        3.0
        >>> bubble_of_a_stage(Layout(pp=4, microbatches=8, schedule="zb-h1"), 1.0, 1.0, 1.0)
        1.0
    """
    bubble = layout.schedule_cost.bubble
    if bubble is None:
        raise ArgumentError(f"schedule {layout.schedule_name!r} has no closed form: simulate it")
    return bubble(forward, inputs, weights, layout.chunks)


def least_bubble(
    layout: Layout, costs: Mapping[str, Sequence[float]], busy: Sequence[float]
) -> float:
    """No order of actions on a V has a smaller bubble, from the first start to the last end.

    A rank begins after the forwards of all stages before its first one. After its last gradient of
    inputs those of these stages follow, and on the first rank the gradients of weights; meanwhile
    it has no more gradients of weights left than microbatches of which it keeps activations.

    Args:
        costs: seconds of one microbatch in each stage, of ``F``, ``I`` and ``W``.
        busy: seconds of all microbatches on each rank.

    Example:
        >>> layout = Layout(pp=2, chunks=2, microbatches=4, schedule="v-half")
        >>> least_bubble(layout, dict.fromkeys("FIW", [1.0] * 4), [24.0] * 2)
        1.0
    """
    weights = costs["W"]
    starts = list(accumulate(costs["F"], initial=0.0))
    drains = list(accumulate(costs["I"], initial=weights[0]))
    least = busy[0]
    for rank in range(1, layout.pp):
        longest = max(weights[rank], weights[-1 - rank])
        left = microbatches_under_way(layout, rank) * longest
        least = max(least, starts[rank] + busy[rank] + max(0.0, drains[rank] - left))
    return least - max(busy)


def microbatches_under_way(layout: Layout, rank: int) -> int:
    """Most activations of one microbatch in one stage that a rank keeps at the same time.

    As ``echelon.pipeline.schedules.simulate`` counts them on the action lists.

    Example:
        >>> layout = Layout(pp=4, microbatches=8)
        >>> [microbatches_under_way(layout, rank) for rank in range(4)]
        [4, 3, 2, 1]
    """
    most = layout.schedule_cost.under_way(layout.pp, layout.chunks, rank)
    return min(layout.microbatches * layout.chunks, most)
