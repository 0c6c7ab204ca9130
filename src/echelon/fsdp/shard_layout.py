"""Where parameters are in a flat buffer, and which rank has which elements; pure arithmetic.

::

    unsharded     | w (3x4) ................ | b (3) ... |        parameters end to end, no padding

    layout="flat" |  rank 0   |  rank 1   |  rank 2 ...  |        by element
    layout="rows" | 0  | 1  | 2 ............ | 0 | 1 | 2 |        each parameter by rows of dim 0

[Note: parts of the wire]
Where ranks share memory, a shard is sent as it is, and ranks have as equal shards as there can be.
Elsewhere all ranks send parts of one length, from 16 KiB on a multiple of 64 bytes: engines such as
NCCL have no collectives for unequal ones, and copy fastest from such addresses. ``part_numel`` is
that length. What is behind a shard in it is padding, which belongs to no parameter and is never
shown::

    by element    | rank 0      | rank 1      | rank 2  ░░░ |    the buffer has room for padding
    by rows       | w[0:2] b[0:1] | w[2:4] ░░░ | w[4:5] ░ ░ |    a part has room for the most rows

By element, a shard is a whole part, and the last ranks have less or nothing. By rows, a parameter
begins at one place in all parts, so that two strided copies move it between its parts and itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import final

from torch import Tensor

from echelon.errors import ArgumentError
from echelon.ranges import pack, shard_range
from echelon.state.tensor_shard import Shape

ALIGN_NBYTES = 64
_LEAST_ALIGNED = 256  # multiples of it, 16 KiB: rounding up adds less than half a percent


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
class RowPiece:
    """Rows of one parameter that several ranks have, each as many, by where they are in the parts.

    Attributes:
        start: the first element, in the flattened parameter.
        offset: where the first rank's rows begin, in the parts of all ranks end to end.
        count: the number of ranks.
        numel: the number of elements of each of them.
        stride: the distance from one rank's to the next one's, in the parts.
    """

    start: int
    offset: int
    count: int
    numel: int
    stride: int

    def view(self, parts: Tensor, shape: Shape) -> Tensor:
        """The rows in the parts, as rows of a parameter of this shape; a dim for ranks if many."""
        rows = parts.as_strided(
            (self.count, self.numel), (self.stride, 1), parts.storage_offset() + self.offset
        )
        if shape:
            row = math.prod(shape[1:])
            rows = rows.view(self.count, self.numel // row, *shape[1:])
        return rows if self.count > 1 else rows[0]


@final
@dataclass(frozen=True, slots=True)
class ShardLayout:
    """How the parameters of one flat buffer are sharded.

    Attributes:
        shapes: the shapes of the parameters.
        starts: where each parameter begins in the unsharded buffer.
        numel: the number of elements of the unsharded buffer.
        size: the number of ranks.
        by_rows: whether each parameter is sharded by rows of dim 0.
        part_numel: the number of elements that each rank sends, with padding; None: those of its
            shard. See [Note: parts of the wire].
    """

    shapes: tuple[Shape, ...]
    starts: tuple[int, ...]
    numel: int
    size: int
    by_rows: bool
    part_numel: int | None = None

    def range_of(self, member: int, rank: int) -> ShardRange:
        """The elements of a parameter that a rank has."""
        shape, start = self.shapes[member], self.starts[member]
        numel = math.prod(shape)
        if self.by_rows:
            rows = shape[0] if shape else 1
            row = numel // rows if rows else 0
            low, high = shard_range(rows, self.size, rank)
            return ShardRange(member, low * row, (high - low) * row)
        low, high = self._part(rank)
        first = min(max(low, start), start + numel)
        return ShardRange(member, first - start, max(min(high, start + numel), first) - first)

    def _part(self, rank: int) -> tuple[int, int]:
        """By element, the range of a rank in the unsharded buffer."""
        if self.part_numel is None:
            return shard_range(self.numel, self.size, rank)
        low = rank * self.part_numel
        return min(low, self.numel), min(low + self.part_numel, self.numel)

    def ranges_of(self, rank: int) -> tuple[ShardRange, ...]:
        """The elements of each parameter that a rank has; some ranges are empty."""
        return tuple(self.range_of(member, rank) for member in range(len(self.shapes)))

    def ranges_by_rank(self, member: int) -> list[ShardRange]:
        """The elements of a parameter that each rank has, in rank order."""
        return [self.range_of(member, rank) for rank in range(self.size)]

    @property
    def numels_by_rank(self) -> list[int]:
        """The number of elements of each rank."""
        if self.by_rows:
            return [sum(span.numel for span in self.ranges_of(rank)) for rank in range(self.size)]
        return [high - low for low, high in map(self._part, range(self.size))]

    @property
    def padded_numel(self) -> int:
        """The number of elements of the parts of all ranks, with padding."""
        return self.numel if self.part_numel is None else self.size * self.part_numel

    @property
    def places(self) -> list[int]:
        """Where each parameter begins in a part with padding, by rows."""
        numels = [self.range_of(member, 0).numel for member in range(len(self.shapes))]
        return [0, *accumulate(numels)][:-1]

    def pieces(self) -> list[list[RowPiece]]:
        """By rows, by parameter, where its rows are in the parts of all ranks."""
        if self.part_numel is not None:
            return [self._padded_pieces(i, place) for i, place in enumerate(self.places)]
        pieces: list[list[RowPiece]] = [[] for _ in self.shapes]
        end = 0
        for rank in range(self.size):
            for span in self.ranges_of(rank):
                if span.numel:
                    pieces[span.member].append(RowPiece(span.start, end, 1, span.numel, 0))
                end += span.numel
        return pieces

    def _padded_pieces(self, member: int, place: int) -> list[RowPiece]:
        """The ranks that have one row more, and the others."""
        stride = self.part_numel
        assert stride is not None
        shape = self.shapes[member]
        num_longer = (shape[0] if shape else 1) % self.size
        pieces = []
        for first, last in ((0, num_longer), (num_longer, self.size)):
            if first < last and (span := self.range_of(member, first)).numel:
                offset = first * stride + place
                pieces.append(RowPiece(span.start, offset, last - first, span.numel, stride))
        return pieces

    def info(self, member: int, rank: int | None = None) -> list[ShardInfo]:
        """Which rank has which elements of a parameter, in rank order, seen from ``rank``."""
        shape = self.shapes[member]
        return [
            ShardInfo(owner, span.start, span.numel, shape, owner == rank)
            for owner, span in enumerate(self.ranges_by_rank(member))
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
        return min(ALIGN_NBYTES, nbytes & -nbytes) if nbytes else ALIGN_NBYTES

    return sorted(range(len(numels)), key=lambda i: -alignment(i))


def layout_by_element(shapes: Sequence[Shape], size: int, align: int | None = None) -> ShardLayout:
    """Shard by element; the first ranks have one element more if the number is not divisible.

    With ``align``, all ranks have parts of one length, so the last ranks have less or nothing. It
    is a multiple of ``align`` elements if it has at least 256 times as many.

    Example:
        >>> [(info.start, info.size) for info in layout_by_element([(10,)], 4).info(0)]
        [(0, 3), (3, 3), (6, 2), (8, 2)]
        >>> [(info.start, info.size) for info in layout_by_element([(10,)], 4, align=16).info(0)]
        [(0, 3), (3, 3), (6, 3), (9, 1)]
        >>> layout_by_element([(20000,)], 3, align=16).numels_by_rank
        [6672, 6672, 6656]
    """
    _check(size)
    placement = pack([math.prod(shape) for shape in shapes])
    part = None if align is None else _part_numel(-(-placement.numel // size), align)
    return ShardLayout(tuple(shapes), placement.starts, placement.numel, size, False, part)


def layout_by_rows(shapes: Sequence[Shape], size: int, align: int | None = None) -> ShardLayout:
    """Shard each parameter by whole rows of dim 0; with fewer rows than ranks, some have none.

    A parameter without dims is one row. With ``align``, all ranks have parts of one length, a
    multiple of ``align`` elements as by element, with room for the most rows that a rank has.

    Example:
        >>> [info.size for info in layout_by_rows([(2, 3)], 4).info(0)]
        [3, 3, 0, 0]
        >>> layout_by_rows([(2, 3)], 4, align=16).padded_numel
        12
    """
    _check(size)
    placement = pack([math.prod(shape) for shape in shapes])
    layout = ShardLayout(tuple(shapes), placement.starts, placement.numel, size, True)
    if align is None:
        return layout
    longest = sum(span.numel for span in layout.ranges_of(0))
    return replace(layout, part_numel=_part_numel(longest, align))


def _part_numel(numel: int, align: int) -> int:
    """The least length that holds so many elements, aligned if that costs little."""
    return numel if numel < _LEAST_ALIGNED * align else -(-numel // align) * align


def _check(size: int) -> None:
    if size < 1:
        raise ArgumentError(f"cannot shard over {size} ranks")
