"""Where parameters are in a flat buffer, and which rank has which elements; pure arithmetic.

::

    unsharded     | w (3x4) ................ | b (3) ... |        parameters end to end, no padding

    layout="flat" |  rank 0   |  rank 1   |  rank 2 ...  |        by element
    layout="rows" | 0  | 1  | 2 ............ | 0 | 1 | 2 |        each parameter by rows of dim 0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from echelon.errors import ArgumentError
from echelon.ranges import pack, shard_range
from echelon.state.tensor_shard import Shape

_ALIGN_NBYTES = 64


@final
@dataclass(frozen=True, slots=True)
class ShardRange:
    """The elements of one parameter that one rank has.

    Attributes:
        member: the index of the parameter.
        start: the first element, in the flattened parameter.
        numel: the number of elements; may be 0.
    """

    member: int
    start: int
    numel: int


@final
@dataclass(frozen=True, slots=True)
class ShardInfo:
    """Which elements of a parameter one rank has; ``FSDP.shard_info`` gives one for each rank.

    Attributes:
        rank: the rank in the group.
        start: the first element, in the flattened parameter.
        size: the number of elements.
        shape: the shape of the unsharded parameter.
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
        shapes: the shapes of the parameters.
        starts: where each parameter begins in the unsharded buffer.
        numel: the number of elements of the unsharded buffer.
        ranges: the ranges by rank, then by parameter; some are empty.
    """

    shapes: tuple[Shape, ...]
    starts: tuple[int, ...]
    numel: int
    ranges: tuple[tuple[ShardRange, ...], ...]

    @property
    def numels_by_rank(self) -> list[int]:
        """The number of elements of each rank."""
        return [sum(span.numel for span in ranges) for ranges in self.ranges]

    def info(self, member: int, rank: int | None = None) -> list[ShardInfo]:
        """Which rank has which elements of a parameter, in rank order, seen from ``rank``."""
        shape = self.shapes[member]
        spans = [ranges[member] for ranges in self.ranges]
        return [
            ShardInfo(owner, span.start, span.numel, shape, owner == rank)
            for owner, span in enumerate(spans)
        ]


def place_order(numels: Sequence[int], itemsize: int) -> list[int]:
    """The order of parameters in a buffer in which none needs padding.

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
    """Shard by element; the first ranks have one element more if the number is not divisible.

    Example:
        >>> [(info.start, info.size) for info in layout_by_element([(10,)], 4).info(0)]
        [(0, 3), (3, 3), (6, 2), (8, 2)]
    """
    _check(size)
    placement = pack([math.prod(shape) for shape in shapes])
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
    placement = pack([math.prod(shape) for shape in shapes])
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
