"""The arithmetic of shards: tensors in a flat buffer, and ranges of a buffer on ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.errors import ArgumentError, RankError


@dataclass(frozen=True, slots=True)
class Placement:
    """Tensors laid end to end in one flat buffer.

    Attributes:
        starts: where each tensor begins, in elements.
        numels: the length of each tensor, in elements.
        numel: the length of the buffer, in elements.
    """

    starts: tuple[int, ...]
    numels: tuple[int, ...]
    numel: int


def pack(numels: Sequence[int], align: int = 1) -> Placement:
    """Lay tensors end to end; each begins at a multiple of ``align`` elements.

    Law: no two tensors overlap, and there are less than ``align`` unused elements after each.

    Example:
        >>> pack([3, 5], align=4)
        Placement(starts=(0, 4), numels=(3, 5), numel=9)
    """
    if align < 1 or any(numel < 0 for numel in numels):
        raise ArgumentError(f"cannot pack lengths {list(numels)} with alignment {align}")
    starts = []
    end = 0
    for numel in numels:
        start = -(-end // align) * align
        starts.append(start)
        end = start + numel
    return Placement(tuple(starts), tuple(numels), end)


def shard_range(numel: int, size: int, rank: int) -> tuple[int, int]:
    """The half-open range of a flat buffer that ``rank`` owns, cut by element.

    The first ``numel % size`` ranks own one element more than the others.
    Law: the ranges of all ranks, in rank order, cover ``range(numel)`` exactly once.

    Example:
        >>> [shard_range(10, 4, rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 8), (8, 10)]
        >>> [shard_range(3, 5, rank) for rank in range(5)]
        [(0, 1), (1, 2), (2, 3), (3, 3), (3, 3)]
    """
    if size < 1 or not 0 <= rank < size:
        raise RankError("rank", rank, size)
    base, extra = divmod(numel, size)
    start = rank * base + min(rank, extra)
    return start, start + base + (rank < extra)


def even_chunks(numel: int, size: int, align: int = 1) -> list[tuple[int, int]]:
    """Cut ``range(numel)`` into ``size`` ranges of equal length, each a multiple of ``align``.

    The last ranges are shorter or empty. It is for ranks that share work on one buffer, where a cut
    inside a cache line would make two cores write to the same line.

    Example:
        >>> even_chunks(10, 3, align=4)
        [(0, 4), (4, 8), (8, 10)]
    """
    if size < 1 or align < 1:
        raise ArgumentError(f"cannot cut {numel} elements into {size} chunks aligned to {align}")
    length = -(-numel // (size * align)) * align
    return [(min(i * length, numel), min((i + 1) * length, numel)) for i in range(size)]
