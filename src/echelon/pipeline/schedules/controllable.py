"""V-Half and V-Min: schedules on a V that trade time for memory.

A building block has the slots of the four computations of one microbatch on every rank, and is
repeated every six slots. Its offsets determine how long activations live, and so the memory.
Gradients of weights take the free slots. Then the computations of the warm-up and of the drain move
to the earliest slots that neither break a dependency nor raise the peak.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, sections 3 and 4.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import final

from echelon.pipeline.schedules.dataflow import Values
from echelon.pipeline.schedules.ir import (
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Kind,
    Schedule,
    schedule_of,
)
from echelon.pipeline.schedules.vshaped import v_shape

# Kinds of slots, in the order in which a microbatch passes through a rank: forward down the V and
# up again, backward down from the end of the model and up again; then gradients of weights.
F0, F1, B1, B0, W = range(5)
PERIOD = 6  # two forwards, two gradients of inputs, two of weights
Grid = list[list[list[int]]]  # the slots of each rank and kind, by microbatch
Mark = tuple[int, int, int, int]  # slot, rank, kind, microbatch


def v_half(ranks: int, microbatches: int) -> Schedule:
    """V-Half: about half the memory of 1F1B.

    Memory: floor((p+2)/2) on every rank, where m is large enough. Bubble: about p/(2m).

    Example:
        >>> print(v_half(2, 3))
        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 3I1 3W1 3F2 3I2 0I1 3W2 0I2 0W0 0W1 0W2
        rank 1 | 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 2W2 1W1 1W2

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, section 3.2.
    """
    p, wait = ranks, 3 if ranks % 2 == 0 else 0
    return _build(
        "v-half",
        ranks,
        microbatches,
        lambda r: (2 * r, 3 * p - r - 2, 3 * p + wait + 2 * r - 1, 6 * p + wait - r - 2),
    )


def v_min(ranks: int, microbatches: int) -> Schedule:
    """V-Min: about a third of the memory of 1F1B, the least on a V.

    Memory: floor((p+4)/3) on every rank, where m is large enough. Bubble: about 2p/(3m) on equal
    stages with F = I = W; it grows where they differ.

    Example:
        >>> print(v_min(2, 3))
        rank 0 | 0F0 0F1 3F0 3I0 3W0 0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 0I2 0W2
        rank 1 | 1F0 2F0 2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 2W2 1W2

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, section 3.2.
    """
    p, wait = ranks, 2 if ranks % 3 == 0 else 0
    return _build(
        "v-min",
        ranks,
        microbatches,
        lambda r: (r, 2 * p - r - 1, 2 * p + wait + r, 4 * p + wait - r - 1),
    )


def _build(
    name: str, ranks: int, microbatches: int, offsets: Callable[[int], tuple[int, ...]]
) -> Schedule:
    base = min(microbatches, 2 * ranks + 2)  # enough for both ends and a period between them
    grid = [
        [[offset + PERIOD * i for i in range(base)] for offset in offsets(r)] for r in range(ranks)
    ]
    with_weights = [[*row, _weights(row)] for row in grid]
    squeezed = _squeeze(_pull(with_weights, ends=(0, 2)))
    last = _pull([row[:W] for row in squeezed], ends=(2,))
    return schedule_of(
        name,
        v_shape(ranks),
        microbatches,
        lambda r: _stretch(list(_order(r, ranks, last[r])), PERIOD * ranks, microbatches - base),
    )


def _stretch(order: list[Action], middle: int, periods: int) -> Iterator[Action]:
    """``order`` with more periods, for more microbatches, in its regular part.

    What is moved at the two ends does not depend on the number of microbatches once the ends do
    not touch. So the middle is repeated instead of moving slots among thousands.
    """
    yield from order[:middle]
    for n in range(periods):
        yield from _later(order[middle : middle + PERIOD], n)
    yield from _later(order[middle:], periods)


def _later(actions: list[Action], microbatches: int) -> Iterator[Action]:
    for kind, i, stage in actions:
        assert i is not None  # computations have one
        yield Action(kind=kind, microbatch=i + microbatches, stage=stage)


def _weights(row: list[list[int]]) -> list[int]:
    """The free slots in which gradients of weights run, each after its backward, oldest first."""
    taken = {slot for slots in row for slot in slots}
    weights: list[int] = []
    slot = 0
    for backward in sorted(row[B1] + row[B0]):
        slot = max(slot, backward) + 1
        while slot in taken:
            slot += 1
        weights.append(slot)
    return weights


def _marks(grid: Grid) -> list[Mark]:
    """All slots in the order of time."""
    return sorted(
        (slot, r, kind, i)
        for r, row in enumerate(grid)
        for kind, slots in enumerate(row)
        for i, slot in enumerate(slots)
    )


def _meaning(r: int, ranks: int) -> list[tuple[Kind, int]]:
    """By kind of slot: the computation and its stage."""
    low, high = r, 2 * ranks - 1 - r
    return [(FORWARD, low), (FORWARD, high), (INPUT, high), (INPUT, low)]


def _needed(ranks: int) -> list[list[list[tuple[int, int]]]]:
    """By rank and kind of slot: the rank and the kind of the slots whose results it needs.

    What a gradient of weights needs is in a list of the rank, not in slots of a kind.
    """
    stages = v_shape(ranks)
    values = Values(len(stages), 1)
    actions = {
        (r, slot): Action(kind=kind, microbatch=0, stage=stage)
        for r in range(ranks)
        for slot, (kind, stage) in enumerate(_meaning(r, ranks))
    }
    makers = {values.result(action): place for place, action in actions.items()}
    return [
        [[makers[value] for value in values.needed(actions[r, slot])] for slot in range(W)] + [[]]
        for r in range(ranks)
    ]


def _earliest(grid: Grid, needed: list[tuple[int, int]], row: list[int], i: int) -> int:
    """The first slot after all that a computation needs, and after the one before of its kind."""
    after = row[i - 1] if i > 0 else -1
    for r, kind in needed:
        after = max(after, grid[r][kind][i])
    return after + 1


def _pull(grid: Grid, ends: tuple[int, ...]) -> Grid:
    """Move slots of the warm-up (end 0) and the drain (end 2) earlier, where memory allows.

    The warm-up lasts until the first backward of the first stage, the drain begins after its last
    forward. Between them (1) the pattern is regular and stays.
    """
    grid = [[list(slots) for slots in row] for row in grid]
    rows = [_Row(row) for row in grid]
    cap, needed = max(row.peak() for row in rows), _needed(len(grid))
    phase, last = 0, len(grid[0][F0]) - 1
    for slot, r, kind, i in _marks(grid):
        if phase == 0 and (r, kind) == (0, B0):
            phase = 1
        stays = phase not in ends
        if phase == 1 and kind == F0 and i == last:
            phase = 2
        if stays:
            continue
        first = _earliest(grid, needed[r][kind], grid[r][kind], i)
        if kind == W:
            first = max(first, rows[r].backwards[i] + 1)
        rows[r].pull(kind, i, first, slot, cap)
    return grid


class _Row:
    """The slots of one rank, and the memory that they need."""

    def __init__(self, row: list[list[int]]) -> None:
        self._row = row
        self._kinds = {slot: kind for kind, slots in enumerate(row) for slot in slots}
        self.backwards = sorted(row[B1] + row[B0])
        self._memory = (_Placed if len(row) > W else _Filled)(self._kinds)

    def peak(self) -> int:
        """Most activations alive."""
        return self._memory.peak()

    def pull(self, kind: int, i: int, first: int, slot: int, cap: int) -> None:
        """Move one computation to the earliest free slot at which the peak stays below the cap."""
        kinds = self._kinds
        del kinds[slot]
        for candidate in range(first, slot):
            if candidate in kinds:
                continue
            kinds[candidate] = kind
            if self._memory.move(kind, candidate, slot, cap):
                self._row[kind][i] = candidate
                if kind in (B1, B0):
                    del self.backwards[bisect_left(self.backwards, slot)]
                    insort(self.backwards, candidate)
                return
            del kinds[candidate]
        kinds[slot] = kind


class _Memory(ABC):
    """Activations alive after each slot of a rank.

    Args:
        kinds: by slot; read again at each move.
    """

    def __init__(self, kinds: Mapping[int, int]) -> None:
        self._kinds = kinds
        self._length = max(kinds, default=0) + 1

    @abstractmethod
    def peak(self) -> int:
        """Most of them."""

    @abstractmethod
    def move(self, kind: int, start: int, end: int, cap: int) -> bool:
        """Count with what moved from ``end`` to ``start``; false if that exceeds the cap."""


@final
class _Placed(_Memory):
    """Gradients of weights have slots: a move changes only what is between its two slots."""

    def __init__(self, kinds: Mapping[int, int]) -> None:
        super().__init__(kinds)
        changes = (_CHANGE.get(kinds.get(slot), 0) for slot in range(self._length))
        self._alive = list(accumulate(changes))

    def peak(self) -> int:
        return max(self._alive)

    def move(self, kind: int, start: int, end: int, cap: int) -> bool:
        change, between = _CHANGE.get(kind, 0), self._alive[start:end]
        if change > 0 and max(between) >= cap:
            return False
        if change:
            self._alive[start:end] = [alive + change for alive in between]
        return True


_CHANGE: dict[int | None, int] = {F0: 1, F1: 1, W: -1}


@final
class _Filled(_Memory):
    """Gradients of weights take the slots that are free: all after a move is replayed."""

    def __init__(self, kinds: Mapping[int, int]) -> None:
        super().__init__(kinds)
        self._states: list[tuple[int, int]] = []  # alive, and gradients of weights that wait
        self._states.extend(self._after(0))

    def peak(self) -> int:
        return max(alive for alive, _ in self._states)

    def move(self, kind: int, start: int, end: int, cap: int) -> bool:
        changed = []
        for slot, state in enumerate(self._after(start), start):
            if state[0] > cap:
                return False
            if slot >= end and state == self._states[slot]:
                break
            changed.append(state)
        self._states[start : start + len(changed)] = changed
        return True

    def _after(self, start: int) -> Iterator[tuple[int, int]]:
        alive, waiting = self._states[start - 1] if start else (0, 0)
        for slot in range(start, self._length):
            kind = self._kinds.get(slot)
            if kind in (F0, F1):
                alive += 1
            elif kind in (B1, B0):
                waiting += 1
            elif waiting:
                alive, waiting = alive - 1, waiting - 1
            yield alive, waiting


def _squeeze(grid: Grid) -> Grid:
    """The same order on every rank, each computation in the earliest slot that it can have."""
    squeezed = [[[0] * len(slots) for slots in row] for row in grid]
    free, needed = [0] * len(grid), _needed(len(grid))
    for _, r, kind, i in _marks(grid):
        slot = max(free[r], _earliest(squeezed, needed[r][kind], squeezed[r][kind], i))
        squeezed[r][kind][i] = slot
        free[r] = slot + 1
    return squeezed


def _order(r: int, ranks: int, row: list[list[int]]) -> Iterator[Action]:
    """The actions of a rank; free slots go to the gradients of weights, the upper stage first."""
    meaning = _meaning(r, ranks)
    at = {slot: (kind, i) for kind, slots in enumerate(row) for i, slot in enumerate(slots)}
    waiting: list[tuple[int, int, int]] = []  # upper stage before lower, then by microbatch
    for slot in range(max(at) + 1):
        if slot in at:
            kind, i = at[slot]
            action, stage = meaning[kind]
            yield Action(kind=action, microbatch=i, stage=stage)
            if action is INPUT:
                heapq.heappush(waiting, (-stage, i, stage))
        elif waiting:
            _, i, stage = heapq.heappop(waiting)
            yield Action(kind=WEIGHT, microbatch=i, stage=stage)
    while waiting:
        _, i, stage = heapq.heappop(waiting)
        yield Action(kind=WEIGHT, microbatch=i, stage=stage)
