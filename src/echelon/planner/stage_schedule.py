"""What the schedule of a pipeline costs without a simulation: its bubble, and what a rank keeps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from echelon.errors import ArgumentError

if TYPE_CHECKING:
    from echelon.planner.layout import Layout

_SEARCHED_CHUNKS = (1, 2, 4)


class ScheduleCost(NamedTuple):
    """What the planner knows of a schedule before its actions are made.

    Attributes:
        chunks: how many stages a rank can have.
        under_way: most activations of one microbatch in one stage that a rank keeps at the same
            time, of many microbatches, by ``pp``, the chunks and the rank.
        bubble: seconds that a rank waits for each other stage, by those of a forward, of the
            gradients of inputs and of those of weights, and the chunks; None: a simulation says it.
        rounds: the search takes it with at least so many microbatches for each rank: with fewer,
            the closed forms are not those of the action lists.
        is_v: whether the last stage is on the rank of the first one.
        waits: whether ranks wait for each other in each round of microbatches, and not only at the
            begin and the end of a step.
        is_named: whether a layout names it; it follows from the chunks otherwise.
    """

    chunks: tuple[int, ...]
    under_way: Callable[[int, int, int], int]
    bubble: Callable[[float, float, float, int], float] | None = None
    rounds: int = 1
    is_v: bool = False
    waits: bool = False
    is_named: bool = True


def _all_parts(forward: float, inputs: float, weights: float, chunks: int) -> float:
    """Narayanan et al., arXiv 2104.04473, section 2.2."""
    return (forward + inputs + weights) / chunks


# The schedules that a search looks at, the simplest first. The zero-bubble schedules fill the
# bubble with gradients of weights (Qi et al., arXiv 2401.10241, table 2, where each rank ends
# alone; here the last one counts). With several stages for a rank the first rank keeps p - 1 more
# (Korthikanti et al., arXiv 2205.05198, section 4.2.3). With 3n - 1 ranks, the first one of V-Min
# gets gradients before it needs all its room.
SCHEDULES = {
    "1f1b": ScheduleCost((1,), lambda pp, chunks, rank: pp - rank, _all_parts, is_named=False),
    "interleaved": ScheduleCost(
        (2, 3, 4, 5, 6, 8), lambda pp, chunks, rank: pp * chunks + pp - 1 - 2 * rank, _all_parts,
        waits=True, is_named=False,
    ),
    "zb-h1": ScheduleCost(
        (1,), lambda pp, chunks, rank: pp, lambda f, i, w, chunks: f + max(0.0, i - w)
    ),
    "zb-h2": ScheduleCost(
        (1,), lambda pp, chunks, rank: 2 * pp - 1, lambda f, i, w, chunks: f + max(0.0, i - 2 * w),
        rounds=2,
    ),
    "zb-v": ScheduleCost(
        (2,), lambda pp, chunks, rank: 2 * pp, lambda f, i, w, chunks: max(f / 2, i / 2, i - w),
        rounds=2, is_v=True,
    ),
    "dualpipe-v": ScheduleCost(
        (2,), lambda pp, chunks, rank: 2 * pp + 1, rounds=2, is_v=True, waits=True
    ),
    "v-half": ScheduleCost(
        (2,), lambda pp, chunks, rank: 2 * ((pp + 2) // 2), rounds=2, is_v=True, waits=True
    ),
    "v-min": ScheduleCost(
        (2,), lambda pp, chunks, rank: 2 * ((pp + 4) // 3) - (rank == 0 and pp % 3 == 2),
        is_v=True, waits=True,
    ),
}  # fmt: skip


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
        >>> from echelon.planner.layout import Layout
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
        >>> from echelon.planner.layout import Layout
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
        >>> from echelon.planner.layout import Layout
        >>> layout = Layout(pp=4, microbatches=8)
        >>> [microbatches_under_way(layout, rank) for rank in range(4)]
        [4, 3, 2, 1]
    """
    most = layout.schedule_cost.under_way(layout.pp, layout.chunks, rank)
    return min(layout.microbatches * layout.chunks, most)
