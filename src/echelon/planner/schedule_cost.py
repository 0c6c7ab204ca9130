"""``SCHEDULES``: what the planner knows of each schedule before its actions are made."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


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
