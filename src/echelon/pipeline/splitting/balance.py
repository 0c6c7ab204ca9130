"""Which blocks go to which stage, so that a schedule ends as early as possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from echelon.pipeline.schedules.ir import Schedule
from echelon.pipeline.schedules.simulate import simulate

Cut = tuple[range, ...]

_THIRDS = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3, "F&B": 1.0}


def makespan(schedule: Schedule, cut: Cut, costs: Sequence[float]) -> float:
    """How long a step takes if backward takes twice as long as forward.

    Args:
        costs: of each block, forward and backward.
    """
    totals = [sum(costs[i] for i in blocks) for blocks in cut]
    by_kind = {kind: [share * one for one in totals] for kind, share in _THIRDS.items()}
    return simulate(schedule, by_kind).makespan


def most_alive(schedule: Schedule) -> list[int]:
    """The microbatches that each stage keeps at most at once.

    Example:
        >>> from echelon.pipeline.schedules.families import schedule
        >>> most_alive(schedule("1f1b", 4, 8, 4))
        [4, 3, 2, 1]
    """
    found = []
    for stage, rank in enumerate(schedule.placement):
        one = [int(other == stage) for other in range(schedule.num_stages)]
        peak = simulate(schedule, stage_nbytes=one).peak_nbytes
        assert peak is not None
        found.append(peak[rank])
    return found


def refine(
    cut: Cut, costs: Sequence[float], schedule: Schedule, fits: Callable[[Cut], bool]
) -> Cut:
    """Move one block at a time across a cut while the schedule ends earlier for it.

    Law: the result ends no later than ``cut``, and no single move makes it end earlier.

    Args:
        costs: of each block, forward and backward.
        fits: whether a cut is allowed.

    Example:
        >>> from echelon.pipeline.schedules.families import schedule
        >>> two = schedule("gpipe", 2, 4, 2)
        >>> refine((range(0, 1), range(1, 4)), [1, 1, 1, 1], two, lambda cut: True)
        (range(0, 2), range(2, 4))
    """
    best = makespan(schedule, cut, costs)
    while True:
        moves = [other for other in _moves(cut) if fits(other)]
        timed = [(makespan(schedule, other, costs), index) for index, other in enumerate(moves)]
        found, index = min(timed, default=(best, -1))
        # A gain within rounding could be taken for ever.
        if found >= best * (1 - 1e-9):
            return cut
        best, cut = found, moves[index]


def _moves(cut: Cut) -> list[Cut]:
    moves = []
    for j, (left, right) in enumerate(pairwise(cut)):
        for step in (-1, 1):
            middle = left.stop + step
            if left.start < middle < right.stop:
                moved = (range(left.start, middle), range(middle, right.stop))
                moves.append((*cut[:j], *moved, *cut[j + 2 :]))
    return moves
