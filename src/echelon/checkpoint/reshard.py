"""Arithmetic of ranges: the share of a copy that a rank writes, and the pieces that a range is in.

::

    saved on 2 ranks   | piece 0 ........ | piece 1 ........ |        one tensor, flattened
    wanted on 3 ranks  | rank 0 ... | rank 1 ... | rank 2 ...|
                                    └ two reads: the end of piece 0, the beginning of piece 1
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

_PART_NBYTES = 1 << 20  # a smaller part is not worth a write of its own
_GRAIN_NBYTES = 1 << 16  # ranges are cut at multiples of it, so that reads stay aligned to pages


class Span(Protocol):
    """A range of a flattened tensor."""

    @property
    def start(self) -> int:
        """First element."""

    @property
    def numel(self) -> int:
        """Number of elements."""


class Read(NamedTuple):
    """The part of one piece that belongs to a wanted range; all in elements.

    Attributes:
        piece: index of the piece.
        skip: elements of the piece before the part.
        at: start of the part in the wanted range.
        numel: length of the part.
    """

    piece: int
    skip: int
    at: int
    numel: int


def reads(pieces: Sequence[Span], start: int, numel: int) -> Iterator[Read]:
    """What to read of ``pieces`` for the range of ``numel`` elements from ``start`` on.

    The pieces are sorted by their start and do not overlap.

    Example:
        >>> from types import SimpleNamespace as Piece
        >>> pieces = [Piece(start=0, numel=6), Piece(start=6, numel=6)]
        >>> list(reads(pieces, 4, 4))
        [Read(piece=0, skip=4, at=0, numel=2), Read(piece=1, skip=0, at=2, numel=2)]
    """
    end = start + numel
    first = max(0, bisect_right(pieces, start, key=lambda piece: piece.start) - 1)
    for i in range(first, len(pieces)):
        piece = pieces[i]
        low, high = max(start, piece.start), min(end, piece.start + piece.numel)
        if piece.start >= end:
            return
        if low < high:
            yield Read(i, low - piece.start, low - start, high - low)


def share(name: str, nbytes: int, itemsize: int, copy: int, num_copies: int) -> tuple[int, int]:
    """The part of a range that one of its copies writes: start and stop, in elements of the range.

    A short range is written by one copy, a long one by several. Which ones depends on the name of
    the tensor alone, so ranks agree without communication, whatever else each of them holds.
    Law: the parts of all copies cover the range exactly once; some of them may be empty.

    Args:
        name: of the tensor.
        nbytes: of the range.
        itemsize: bytes of an element.

    Example:
        >>> [share("weight", 4 << 20, 4, copy, 2) for copy in (0, 1)]
        [(524288, 1048576), (0, 524288)]
    """
    num_parts = max(1, min(num_copies, nbytes // _PART_NBYTES))
    part = (copy + zlib.crc32(name.encode())) % num_copies
    if part >= num_parts:
        return 0, 0
    start, stop = (_cut(nbytes * i // num_parts, nbytes) for i in (part, part + 1))
    return start // itemsize, stop // itemsize


def _cut(position: int, nbytes: int) -> int:
    """Move a cut inside of a range down to a multiple of the grain; the ends stay."""
    return nbytes if position == nbytes else position // _GRAIN_NBYTES * _GRAIN_NBYTES
