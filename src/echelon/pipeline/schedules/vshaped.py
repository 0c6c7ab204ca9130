"""ZB-V and DualPipeV: stages go down the ranks and up again, so rank r has stages r and 2p-1-r.

Rank 0 has the first and the last stage, so that an embedding and a head with tied weights are on
one rank. Units of memory and bubbles are those of ``looped``; a stage counts 1/2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Item,
    Kind,
    Pair,
    Schedule,
    schedule_of,
)


def v_shape(ranks: int) -> tuple[int, ...]:
    """The rank of each stage, down the ranks and up again: rank 0 has both ends of the model.

    Example:
        >>> v_shape(3)
        (0, 1, 2, 2, 1, 0)
    """
    down = tuple(range(ranks))
    return down + down[::-1]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: two stages a rank on a V, backwards split, every rank with the same memory.

    Memory: p on every rank. Bubble for m >= 2p-1: no rank idles between its own first and last
    action; over all ranks (p-1)/(6m+p-1).

    Example:
        >>> print(zb_v(2, 3))
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
        rank 1 | 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 6.
    """
    # With fewer microbatches the pattern of 2p-1 runs without the actions of those beyond m.
    whole = max(2 * ranks - 1, microbatches)
    return schedule_of(
        "zb-v",
        v_shape(ranks),
        microbatches,
        lambda r: (a for a in _zb_v_order(r, ranks, whole) if (a.microbatch or 0) < microbatches),
    )


def _zb_v_order(r: int, ranks: int, microbatches: int) -> Iterator[Action]:
    rank = _Counter(r, ranks)
    for _ in range(2 * (ranks - r) - 1):
        yield rank.next(FORWARD, 0)
    for _ in range(r):
        yield rank.next(FORWARD, 1)
        yield rank.next(FORWARD, 0)
    for _ in range(ranks - r):
        yield rank.next(FORWARD, 1)
        yield rank.next(INPUT, 1)
        yield rank.next(WEIGHT, 1)
    while rank.count(FORWARD, 1) < rank.count(FORWARD, 0) or rank.count(FORWARD, 0) < microbatches:
        if rank.count(FORWARD, 0) < microbatches:
            yield rank.next(FORWARD, 0)
        yield rank.next(INPUT, 0)
        yield rank.next(WEIGHT, 0)
        yield rank.next(FORWARD, 1)
        yield rank.next(INPUT, 1)
        yield rank.next(WEIGHT, 1)
    for _ in range(r):
        yield rank.next(INPUT, 0)
        yield rank.next(INPUT, 1)
    for _ in range(ranks - r):
        yield rank.next(INPUT, 0)
        yield rank.next(WEIGHT, 0)
    for chunk in (1, 0):
        while rank.count(WEIGHT, chunk) < microbatches:
            yield rank.next(WEIGHT, chunk)


def dualpipe_v(ranks: int, microbatches: int, *, fused: bool = False) -> Schedule:
    """DualPipeV: a forward of one direction beside a backward of the other.

    Memory: p + 1/2 on every rank. Bubble: (p-1)/(6m+p-1) unfused; (p-1)/(3m+p-1) fused, because
    what the forward of a pair produces then waits for its backward. Fuse only where one kernel
    runs both at the cost of less than both.

    Args:
        ranks: number of ranks.
        microbatches: number of microbatches, at least ``2 * ranks``.
        fused: whether a forward and a backward beside each other become one ``Pair``.

    Raises:
        ArgumentError: fewer microbatches.

    Example:
        >>> print(dualpipe_v(2, 4))
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3
        rank 1 | 1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3
        >>> print(dualpipe_v(2, 4, fused=True).orders[1][6])  # what is 2F2 1B0 above
        (2F2;1B0)OVERLAP_F_B

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.2.1 (DualPipe), and the
    V-shaped half of it, "DualPipeV" in the DualPipe repository, 2025.
    """
    if microbatches < 2 * ranks:
        raise ArgumentError(
            f"dualpipe-v needs at least {2 * ranks} microbatches on {ranks} ranks, and there are "
            f"{microbatches}: use more microbatches, or zb-v, which runs with any number"
        )
    return schedule_of(
        "dualpipe-v",
        v_shape(ranks),
        microbatches,
        lambda r: _dualpipe_v_order(r, ranks, microbatches, fused=fused),
    )


def _dualpipe_v_order(r: int, ranks: int, microbatches: int, *, fused: bool) -> Iterator[Item]:
    rank, behind = _Counter(r, ranks), ranks - 1 - r
    waiting: deque[Action] = deque()  # gradients of weights, oldest first

    def backward(chunk: int, *, split: bool) -> Action:
        if not split:
            return rank.next(BACKWARD, chunk)
        action = rank.next(INPUT, chunk)
        waiting.append(action._replace(kind=WEIGHT))
        return action

    def pair(forward_chunk: int, *, together: bool = fused) -> Iterator[Item]:
        forward = rank.next(FORWARD, forward_chunk)
        back = rank.next(BACKWARD, 1 - forward_chunk)
        yield from ((Pair(forward, back),) if together else (forward, back))

    for _ in range(2 * behind):
        yield rank.next(FORWARD, 0)
    for _ in range(r + 1):
        yield rank.next(FORWARD, 0)
        yield rank.next(FORWARD, 1)
    for _ in range(behind):
        yield backward(1, split=True)
        yield waiting.popleft()
        yield rank.next(FORWARD, 1)
    for n in range(microbatches - 2 * ranks + r + 1):
        # The first backward of the last rank needs its own forward just before: no pair yet.
        yield from pair(0, together=fused and not (n == 0 and behind == 0))
        yield from pair(1)
    for _ in range(behind):
        yield backward(1, split=False)
        yield from pair(1)
    half = (r + 1) // 2  # from here on backwards are split, on odd ranks one action earlier
    for n in range(r + 1):
        yield backward(1, split=n > half or (n == half and r % 2 == 1))
        yield backward(0, split=n >= half)
    for _ in range(behind):
        yield waiting.popleft()
        yield backward(0, split=True)
    yield from waiting


class _Counter:
    """Counts the actions of a rank, so that each kind runs the microbatches in order."""

    def __init__(self, r: int, ranks: int) -> None:
        self._stages = (r, 2 * ranks - 1 - r)
        backwards = [0, 0]  # whole and split ones count together
        self._counts = {FORWARD: [0, 0], BACKWARD: backwards, INPUT: backwards, WEIGHT: [0, 0]}

    def count(self, kind: Kind, chunk: int) -> int:
        """The number of actions of this kind so far."""
        return self._counts[kind][chunk]

    def next(self, kind: Kind, chunk: int) -> Action:
        """The action of the next microbatch."""
        counts = self._counts[kind]
        microbatch = counts[chunk]
        counts[chunk] = microbatch + 1
        return Action(kind=kind, microbatch=microbatch, stage=self._stages[chunk])
