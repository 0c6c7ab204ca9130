"""Cuts a sequence of blocks into stages: the exact optimum, by numbers alone.

``partition`` makes the slowest stage as fast as possible; ``refine`` then moves blocks as long as
the simulation of a schedule ends earlier.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from echelon.checks import integer, number
from echelon.errors import ArgumentError
from echelon.pipeline.schedules.ir import Schedule
from echelon.pipeline.schedules.simulate import simulate

Partition = tuple[range, ...]  # the blocks of each stage
Pair = tuple[float, float]  # first and second criterion, compared in this order
FORBIDDEN = (math.inf, math.inf)
Cost = Callable[[int, int, int], Pair]  # of stage j if it has the blocks start..stop-1


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    nbytes: Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
    alive: Sequence[float] | None = None,
    cap: float | None = None,
    cuts: Sequence[float] | None = None,
) -> Partition:
    """Cut blocks into consecutive stages so that the slowest stage is as fast as possible.

    Law: no cut has a smaller largest cost. Of the cuts that reach it, one is taken whose largest
    memory is smallest, of these one where the least crosses between stages, and of these the most
    even one.

    Args:
        costs: time of each block, in any unit.
        stages: how many; each gets at least one block.
        nbytes: what each block keeps all the time (parameters, gradients, optimizer state).
        activations: bytes that each block keeps for one microbatch.
        alive: how many microbatches each stage keeps at once, from a simulation's peak; 1 if None.
        cap: most bytes of a stage: its blocks' ``nbytes`` and ``alive`` times their activations.
        cuts: bytes that cross behind each block if a stage ends there.

    Returns:
        the blocks of each stage.

    Raises:
        ArgumentError: more stages than blocks, a list of another length, a negative number, or no
            cut within the cap; the sentence then has the least cap that works.

    Example:
        >>> [list(blocks) for blocks in partition([1, 1, 1, 1, 4], 3)]
        [[0, 1], [2, 3], [4]]
        >>> partition([2, 2, 2], 2, nbytes=[9, 1, 1])  # as slow as 2 + 1 and less memory
        (range(0, 1), range(1, 3))

    Source: the linear partition problem; Skiena, "The Algorithm Design Manual", 3rd edition, 2020,
    section 10.7.
    """
    if isinstance(costs, str | bytes) or not isinstance(costs, Sequence):
        raise ArgumentError(f"costs is {costs!r:.80}; give a list of numbers")
    n = len(costs)
    if not 1 <= integer("stages", stages) <= n:
        raise ArgumentError(
            f"{n} blocks cannot be cut into {stages} stages: use at least 1 and at most {n} stages"
        )
    measures = _Measures(
        costs=costs,
        nbytes=nbytes if nbytes is not None else [0] * n,
        activations=activations if activations is not None else [0] * n,
        alive=alive if alive is not None else [1] * stages,
        cuts=cuts if cuts is not None else [0] * n,
        stages=stages,
    )
    return _decide(measures, n, stages, math.inf if cap is None else number("cap", cap, 0.0))


def _decide(measures: _Measures, n: int, stages: int, cap: float) -> Partition:
    """Optimise one criterion after the other, each with the previous ones as limits.

    All at once would not be exact: a prefix with a better second criterion might be dropped for its
    first one, which a later stage exceeds anyway.
    """
    time, memory = measures.time, measures.memory
    fastest, _ = _best(n, stages, _within(time, [(memory, cap)]), max)
    if fastest == FORBIDDEN:
        (least, _), _ = _best(n, stages, memory, max)
        raise ArgumentError(
            f"no cut of {n} blocks into {stages} stages keeps every stage within {cap:g} bytes; "
            f"the least cap that works is {least:g}: raise it, or use more stages"
        )
    smallest, _ = _best(n, stages, _within(memory, [(memory, cap), (time, fastest[0])]), max)
    limits = [(time, fastest[0]), (memory, smallest[0])]
    _, starts = _best(n, stages, _within(measures.crossing, limits), _add)
    return tuple(range(*pair) for pair in zip(starts, [*starts[1:], n], strict=True))


class _Measures:
    """Time, memory and traffic of a stage with the blocks start..stop-1."""

    def __init__(
        self,
        *,
        costs: Sequence[float],
        nbytes: Sequence[float],
        activations: Sequence[float],
        alive: Sequence[float],
        cuts: Sequence[float],
        stages: int,
    ) -> None:
        n = len(costs)
        by_block = {"costs": costs, "nbytes": nbytes, "activations": activations, "cuts": cuts}
        for name, numbers in by_block.items():
            _numbers(name, numbers, n)
        _numbers("alive", alive, stages)
        self._times, self._kept, self._held = (
            list(accumulate(numbers, initial=0)) for numbers in (costs, nbytes, activations)
        )
        self._alive, self._cuts = alive, cuts

    def time(self, j: int, start: int, stop: int) -> Pair:
        """The time of the stage."""
        return self._times[stop] - self._times[start], 0.0

    def memory(self, j: int, start: int, stop: int) -> Pair:
        """The bytes that it keeps as stage j."""
        held = self._alive[j] * (self._held[stop] - self._held[start])
        return self._kept[stop] - self._kept[start] + held, 0.0

    def crossing(self, j: int, start: int, stop: int) -> Pair:
        """The bytes that it sends on, then its squared time, whose sum is least for even stages."""
        sent = self._cuts[stop - 1] if stop < len(self._cuts) else 0.0
        return sent, (self._times[stop] - self._times[start]) ** 2


def _within(cost: Cost, limits: Sequence[tuple[Cost, float]]) -> Cost:
    """``cost``, which is forbidden where a limit is exceeded."""

    def limited(j: int, start: int, stop: int) -> Pair:
        allowed = all(other(j, start, stop)[0] <= limit for other, limit in limits)
        return cost(j, start, stop) if allowed else FORBIDDEN

    return limited


def _add(a: Pair, b: Pair) -> Pair:
    return a[0] + b[0], a[1] + b[1]


def _best(
    n: int, stages: int, cost: Cost, join: Callable[[Pair, Pair], Pair]
) -> tuple[Pair, list[int]]:
    """The least joined cost of all cuts of n blocks, and the starts of its stages."""
    best = [cost(0, 0, stop) if stop else FORBIDDEN for stop in range(n + 1)]
    origins: list[list[int]] = [[0] * (n + 1)]
    for j in range(1, stages):
        row, origin = [FORBIDDEN] * (n + 1), [0] * (n + 1)
        for stop in range(j + 1, n + 1):
            for start in range(stop - 1, j - 1, -1):
                if best[start] == FORBIDDEN:
                    continue
                joined = join(best[start], cost(j, start, stop))
                if joined < row[stop]:
                    row[stop], origin[stop] = joined, start
        best = row
        origins.append(origin)
    starts, stop = list[int](), n
    for origin in reversed(origins):
        stop = origin[stop]
        starts.append(stop)
    return best[n], starts[::-1]


def _numbers(name: str, numbers: Sequence[float], length: int) -> None:
    if isinstance(numbers, str | bytes) or not isinstance(numbers, Sequence):
        raise ArgumentError(f"{name} is {numbers!r:.80}; give a list of numbers")
    if len(numbers) != length:
        raise ArgumentError(f"{name} has {len(numbers)} numbers; give {length}")
    for i, value in enumerate(numbers):
        number(f"{name}[{i}]", value, 0.0)


_THIRDS = {"F": 1 / 3, "B": 2 / 3, "I": 1 / 3, "W": 1 / 3, "F&B": 1.0}


def makespan(schedule: Schedule, stages: Partition, costs: Sequence[float]) -> float:
    """The simulated time of a step if backward takes twice as long as forward.

    A cost is that of the forward and the backward of a block.
    """
    totals = [sum(costs[i] for i in blocks) for blocks in stages]
    by_kind = {kind: [share * total for total in totals] for kind, share in _THIRDS.items()}
    return simulate(schedule, by_kind).makespan


def most_alive(schedule: Schedule) -> list[int]:
    """The largest number of microbatches that each stage keeps at once.

    Example:
        >>> from echelon.pipeline.schedules.families import schedule
        >>> most_alive(schedule("1f1b", 4, 8, 4))
        [4, 3, 2, 1]
    """
    most = []
    for stage, rank in enumerate(schedule.placement):
        one_byte = [int(other == stage) for other in range(schedule.num_stages)]
        peak = simulate(schedule, stage_nbytes=one_byte).peak_nbytes
        assert peak is not None
        most.append(peak[rank])
    return most


def refine(
    stages: Partition, costs: Sequence[float], schedule: Schedule, fits: Callable[[Partition], bool]
) -> Partition:
    """Move one block at a time across a cut as long as the schedule ends earlier.

    Law: the result ends no later than ``stages``, and no single move makes it end earlier. A cost
    is that of the forward and the backward of a block; partitions that do not fit are not used.

    Example:
        >>> from echelon.pipeline.schedules.families import schedule
        >>> two = schedule("gpipe", 2, 4, 2)
        >>> refine((range(0, 1), range(1, 4)), [1, 1, 1, 1], two, lambda cut: True)
        (range(0, 2), range(2, 4))
    """
    best = makespan(schedule, stages, costs)
    while True:
        moves = [moved for moved in _moves(stages) if fits(moved)]
        timed = [(makespan(schedule, moved, costs), index) for index, moved in enumerate(moves)]
        fastest, index = min(timed, default=(best, -1))
        # Gains by rounding errors could be taken forever.
        if fastest >= best * (1 - 1e-9):
            return stages
        best, stages = fastest, moves[index]


def _moves(stages: Partition) -> list[Partition]:
    """The partitions in which one block is on the other side of one cut."""
    moves = []
    for j, (left, right) in enumerate(pairwise(stages)):
        for step in (-1, 1):
            middle = left.stop + step
            if left.start < middle < right.stop:
                moved = (range(left.start, middle), range(middle, right.stop))
                moves.append((*stages[:j], *moved, *stages[j + 2 :]))
    return moves
