"""What the schedule of a pipeline costs without a simulation: its bubble, and what a rank keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from echelon.errors import ArgumentError
from echelon.planner.layout import Layout

# Schedules that split a backward are taken with at least so many microbatches for each rank: with
# fewer, the closed forms are not those of the action lists.
_ROUNDS = {"zb-h2": 2, "zb-v": 2, "dualpipe-v": 2, "v-half": 2}
# Their bubble is known from a simulation only.
WITHOUT_CLOSED_FORM = ("dualpipe-v", "v-half", "v-min")
_SPLIT = {"zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe-v": 2, "v-half": 2, "v-min": 2}


def schedule_choices(pp: int, layers: int, microbatches: int) -> list[tuple[str | None, int]]:
    """The schedules and chunks that a search looks at, the simplest first.

    Example:
        >>> schedule_choices(pp=2, layers=4, microbatches=2)
        [(None, 1), (None, 2), ('zb-h1', 1), ('v-min', 2)]
    """
    if pp == 1:
        return [(None, 1)]
    if microbatches < pp:
        return []
    choices: list[tuple[str | None, int]] = [(None, v) for v in (1, 2, 4) if layers >= pp * v]
    for name, chunks in _SPLIT.items():
        if layers >= pp * chunks and microbatches >= _ROUNDS.get(name, 1) * pp:
            choices.append((name, chunks))
    return choices


def bubble_of_a_stage(layout: Layout, forward: float, inputs: float, weights: float) -> float:
    """Seconds that a rank waits for each other stage in a step, from the first start to the last
    end.

    Args:
        forward: seconds of a forward of one microbatch in the stages of a rank.
        inputs: seconds of the gradients of its inputs.
        weights: seconds of the gradients of its weights.

    Returns:
        1F1B: all three (Narayanan et al., arXiv 2104.04473, section 2.2), interleaved: so much
        divided by the chunks; the zero-bubble schedules fill it with gradients of weights (Qi et
        al., arXiv 2401.10241, table 2, where each rank ends alone; here the last one counts).

    Example:
        >>> bubble_of_a_stage(Layout(pp=4, microbatches=8), 1.0, 1.0, 1.0)
        3.0
        >>> bubble_of_a_stage(Layout(pp=4, microbatches=8, schedule="zb-h1"), 1.0, 1.0, 1.0)
        1.0
    """
    match layout.schedule_name:
        case "zb-h1":
            return forward + max(0.0, inputs - weights)
        case "zb-h2":
            return forward + max(0.0, inputs - 2 * weights)
        case "zb-v":
            return max(forward / 2, inputs / 2, inputs - weights)
        case name if name in WITHOUT_CLOSED_FORM:
            raise ArgumentError(f"schedule {name!r} has no closed form: simulate it")
        case _:
            return (forward + inputs + weights) / layout.chunks


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

    As ``echelon.pipeline.schedules.simulate`` counts them on the action lists. With ``chunks``
    stages for a rank the first rank keeps p - 1 more (Korthikanti et al., arXiv 2205.05198, section
    4.2.3).

    Example:
        >>> layout = Layout(pp=4, microbatches=8)
        >>> [microbatches_under_way(layout, rank) for rank in range(4)]
        [4, 3, 2, 1]
    """
    pp, chunks = layout.pp, layout.chunks
    match layout.schedule_name:
        case "zb-h1" | "zb-v":
            most = pp * chunks
        case "dualpipe-v":
            most = 2 * pp + 1
        case "v-half":
            most = 2 * ((pp + 2) // 2)
        case "v-min":
            # With 3n - 1 ranks, the first one gets gradients before it needs all its room.
            most = 2 * ((pp + 4) // 3) - (rank == 0 and pp % 3 == 2)
        case "zb-h2":
            most = 2 * pp - 1
        case "interleaved":
            most = pp * chunks + pp - 1 - 2 * rank
        case _:
            most = pp - rank
    return min(layout.microbatches * chunks, most)
