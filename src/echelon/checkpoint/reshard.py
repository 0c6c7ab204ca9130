"""Pure arithmetic of ranges: who writes what of a copy, and where what is wanted lies.

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

_PART_NBYTES = 1 << 20  # the least that is worth a part of its own
_GRAIN_NBYTES = 1 << 16  # where ranges are cut, so that reads stay aligned to pages


class Span(Protocol):
    """A range of a flattened tensor."""

    @property
    def start(self) -> int:
        """First element."""

    @property
    def numel(self) -> int:
        """Number of elements."""


class Read(NamedTuple):
    """What one piece gives to a wanted range; all in elements.

    Attributes:
        piece: which of the pieces.
        skip: elements of the piece before those that are wanted.
        at: where they belong in the wanted range.
        numel: how many.
    """

    piece: int
    skip: int
    at: int
    numel: int


def reads(pieces: Sequence[Span], start: int, numel: int) -> Iterator[Read]:
    """What to read of ``pieces`` for the range of ``numel`` elements from ``start`` on.

    Args:
        pieces: sorted by their start; they do not overlap.

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
    """The part of a range that one of the ranks that hold it writes.

    A short range is written by one of them, a long one by several. Who that is depends on its name
    alone, so that ranks agree without a word, whatever else each of them holds.
    Law: the parts of all copies cover the range exactly once.

    Args:
        name: of the tensor.
        nbytes: of the range.
        itemsize: bytes of an element.
        copy: which of the ranks.
        num_copies: how many.

    Returns:
        ``(start, stop)`` in elements of the range; ``start == stop`` where all of it is others'.

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
    """A cut inside of a range lies at a multiple of the grain; the ends stay."""
    return nbytes if position == nbytes else position // _GRAIN_NBYTES * _GRAIN_NBYTES
