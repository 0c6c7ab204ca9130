"""The division of a batch among ranks."""

from __future__ import annotations

from echelon.checks import integer
from echelon.comm.group import Group
from echelon.errors import ArgumentError, RankError


def share_of(batch: range, rank: int, size: int) -> range:
    """A rank's positions of a batch: lower ranks have those before, and perhaps one more.

    Example:
        >>> [list(share_of(range(10, 15), rank, 2)) for rank in range(2)]
        [[10, 11, 12], [13, 14]]
    """
    each, more = divmod(len(batch), size)
    start = batch.start + rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def shares_of(num_samples: int, size: int) -> tuple[int, ...]:
    """The number of samples of a batch that each rank has."""
    return tuple(len(share_of(range(num_samples), rank, size)) for rank in range(size))


def rank_and_size(group: object) -> tuple[int, int]:
    """The place of this rank among those that share a batch.

    Raises:
        ArgumentError: it is neither a group nor ``(rank, size)``.
    """
    if isinstance(group, Group):
        return group.rank, group.size
    if not isinstance(group, tuple) or len(group) != 2:
        raise ArgumentError(
            f"group is {group!r:.80}; give a Group such as world.group or mesh['dp'], "
            "or a tuple (rank, size)"
        )
    size = integer("size", group[1], low=1)
    rank = integer("rank", group[0])
    if rank >= size:
        raise RankError("rank", rank, size)
    return rank, size
