"""Where to cut a row of blocks into stages: the exact optimum, from numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from echelon.errors import ArgumentError

__all__ = ["partition"]

# First and second criterion, compared in this order. NEVER is worse than all that is allowed.
Pair = tuple[float, float]
NEVER = (math.inf, math.inf)
# What stage j costs if it is made of the blocks start..stop-1.
Cost = Callable[[int, int, int], Pair]


def partition(
    costs: Sequence[float],
    stages: int,
    *,
    nbytes: Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
    alive: Sequence[float] | None = None,
    cap: float | None = None,
    cuts: Sequence[float] | None = None,
) -> tuple[range, ...]:
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
    n = len(costs)
    if not 1 <= stages <= n:
        raise ArgumentError(
            f"{n} blocks cannot be cut into {stages} stages: use at least 1 and at most {n} stages"
        )
    lists = {"costs": costs, "nbytes": nbytes, "activations": activations, "cuts": cuts}
    for name, numbers in (*lists.items(), ("alive", alive)):
        if numbers is not None:
            _numbers(name, numbers, stages if name == "alive" else n)
    times, kept = _sums(costs), _sums(nbytes or [0] * n)
    held, copies = _sums(activations or [0] * n), alive or [1] * stages
    most = math.inf if cap is None else cap

    def time(j: int, start: int, stop: int) -> Pair:
        return times[stop] - times[start], 0.0

    def memory(j: int, start: int, stop: int) -> Pair:
        return kept[stop] - kept[start] + copies[j] * (held[stop] - held[start]), 0.0

    def crossing(j: int, start: int, stop: int) -> Pair:
        behind = cuts[stop - 1] if cuts is not None and stop < n else 0.0
        return behind, (times[stop] - times[start]) ** 2

    def within(cost: Cost, limits: list[tuple[Cost, float]]) -> Cost:
        def limited(j: int, start: int, stop: int) -> Pair:
            allowed = all(other(j, start, stop)[0] <= limit for other, limit in limits)
            return cost(j, start, stop) if allowed else NEVER

        return limited

    # One criterion after the other, each with those before it as limits. Deciding them together
    # would not be exact: a prefix with a better second criterion may have been thrown away for a
    # first one that a later stage exceeds anyway.
    fastest, _ = _best(n, stages, within(time, [(memory, most)]), max)
    if fastest == NEVER:
        (least, _), _ = _best(n, stages, memory, max)
        raise ArgumentError(
            f"no cut of {n} blocks into {stages} stages keeps every stage within {most:g} bytes; "
            f"the least cap that works is {least:g}: raise it, or use more stages"
        )
    limits: list[tuple[Cost, float]] = [(memory, most), (time, fastest[0])]
    smallest, _ = _best(n, stages, within(memory, limits), max)
    limits = [(time, fastest[0]), (memory, smallest[0])]
    _, starts = _best(n, stages, within(crossing, limits), _add)
    return tuple(range(*pair) for pair in zip(starts, [*starts[1:], n], strict=True))


def _add(a: Pair, b: Pair) -> Pair:
    return a[0] + b[0], a[1] + b[1]


def _best(
    n: int, stages: int, cost: Cost, join: Callable[[Pair, Pair], Pair]
) -> tuple[Pair, list[int]]:
    """The least joined cost over all cuts of n blocks, and where its stages start."""
    best = [cost(0, 0, stop) if stop else NEVER for stop in range(n + 1)]
    origins: list[list[int]] = [[0] * (n + 1)]
    for j in range(1, stages):
        row, origin = [NEVER] * (n + 1), [0] * (n + 1)
        for stop in range(j + 1, n + 1):
            for start in range(stop - 1, j - 1, -1):
                if best[start] == NEVER:
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


def _sums(numbers: Sequence[float]) -> list[float]:
    return list(accumulate(numbers, initial=0))


def _numbers(name: str, numbers: Sequence[float], length: int) -> None:
    if len(numbers) != length:
        raise ArgumentError(f"{name} has {len(numbers)} numbers; give {length}")
    for number in numbers:
        if not isinstance(number, int | float) or not 0 <= number < math.inf:
            raise ArgumentError(f"{name} has {number!r:.80}; give numbers >= 0")
