"""Pure arithmetic of a flat buffer: where parameters lie in it, and which rank has what of them.

::

    unsharded     | w (3x4) ................ | b (3) ... |        parameters end to end, no padding

    layout="flat" |  rank 0   |  rank 1   |  rank 2 ...  |        by element
    layout="rows" | 0  | 1  | 2 ............ | 0 | 1 | 2 |        each parameter by rows of dim 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from echelon.errors import ArgumentError
from echelon.ranges import pack, shard_range

_ALIGN_NBYTES = 64

Shape = tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class ShardRange:
    """What one rank has of one parameter.

    Attributes:
        member: which parameter.
        start: its first element in that parameter.
        numel: number of elements; may be 0.
    """

    member: int
    start: int
    numel: int


@final
@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which elements of a parameter one rank has.

    Attributes:
        rank: in the group.
        start: first element, in the flattened parameter.
        size: number of elements.
        shape: of the unsharded parameter.
        is_local: whether that rank is this one.
    """

    rank: int
    start: int
    size: int
    shape: Shape
    is_local: bool = False


@final
@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How the parameters of one flat buffer are sharded.

    Attributes:
        shapes: of the parameters.
        starts: where each begins in the unsharded buffer.
        numel: of the unsharded buffer.
        ranges: by rank, then by parameter, in order; some of them are empty.
    """

    shapes: tuple[Shape, ...]
    starts: tuple[int, ...]
    numel: int
    ranges: tuple[tuple[ShardRange, ...], ...]

    @property
    def numels_by_rank(self) -> list[int]:
        """Number of elements of each rank."""
        return [sum(span.numel for span in ranges) for ranges in self.ranges]

    def info(self, member: int, rank: int | None = None) -> list[ShardInfo]:
        """Which rank has what of one parameter, in rank order, seen from ``rank``."""
        shape = self.shapes[member]
        spans = [ranges[member] for ranges in self.ranges]
        return [
            ShardInfo(owner, span.start, span.numel, shape, owner == rank)
            for owner, span in enumerate(spans)
        ]


def numel_of(shape: Shape) -> int:
    """Number of elements."""
    numel = 1
    for length in shape:
        numel *= length
    return numel


def place_order(numels: Sequence[int], itemsize: int) -> list[int]:
    """In which order parameters lie in a buffer so that none needs padding.

    Those whose length is a multiple of 64 bytes come first, then of 32, and so on; so every
    parameter begins at a multiple of the power of two that divides its own length.

    Example:
        >>> place_order([3, 32, 4], itemsize=4)
        [1, 2, 0]
    """

    def alignment(i: int) -> int:
        nbytes = numels[i] * itemsize
        return min(_ALIGN_NBYTES, nbytes & -nbytes) if nbytes else _ALIGN_NBYTES

    return sorted(range(len(numels)), key=lambda i: -alignment(i))


def layout_by_element(shapes: Sequence[Shape], size: int) -> ShardLayout:
    """Shard by element; the first ranks have one more where it does not come out even.

    Example:
        >>> [(info.start, info.size) for info in layout_by_element([(10,)], 4).info(0)]
        [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    _check(size)
    placement = pack([numel_of(shape) for shape in shapes])
    by_rank = []
    for rank in range(size):
        low, high = shard_range(placement.numel, size, rank)
        ranges = []
        for member, (start, numel) in enumerate(
            zip(placement.starts, placement.numels, strict=True)
        ):
            first = min(max(low, start), start + numel)
            last = max(min(high, start + numel), first)
            ranges.append(ShardRange(member, first - start, last - first))
        by_rank.append(tuple(ranges))
    return ShardLayout(tuple(shapes), placement.starts, placement.numel, tuple(by_rank))


def layout_by_rows(shapes: Sequence[Shape], size: int) -> ShardLayout:
    """Shard each parameter by whole rows of dim 0; with fewer rows than ranks, some have none.

    A parameter without dims is one row.

    Example:
        >>> [info.size for info in layout_by_rows([(2, 3)], 4).info(0)]
        [3, 3, 0, 0]
    """
    _check(size)
    placement = pack([numel_of(shape) for shape in shapes])
    by_rank = []
    for rank in range(size):
        ranges = []
        for member, shape in enumerate(shapes):
            rows = shape[0] if shape else 1
            row = placement.numels[member] // rows if rows else 0
            first, last = shard_range(rows, size, rank)
            ranges.append(ShardRange(member, first * row, (last - first) * row))
        by_rank.append(tuple(ranges))
    return ShardLayout(tuple(shapes), placement.starts, placement.numel, tuple(by_rank))


def _check(size: int) -> None:
    if size < 1:
        raise ArgumentError(f"cannot shard over {size} ranks")
