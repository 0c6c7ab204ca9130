"""The division of a batch among ranks."""

from __future__ import annotations

from echelon.checks import integer
from echelon.comm.group import Group
from echelon.errors import ArgumentError, RankError, StateError


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


def weight_of(shares: tuple[int, ...], rank: int) -> float:
    """The weight of the mean of one rank's share in the mean over ranks of the whole batch.

    Example:
        >>> [weight_of((3, 1), rank) for rank in range(2)]
        [1.5, 0.5]
    """
    return shares[rank] * len(shares) / sum(shares)


def check_batch_size(batch_size: int, size: int) -> None:
    """Refuse a batch that has fewer samples than there are ranks."""
    if batch_size < size:
        raise ArgumentError(
            f"a batch of {batch_size} samples has none for some of {size} ranks: "
            f"batch_size counts those of all ranks, so give at least {size}"
        )


def check_same_data(group: Group, place: object, what: str) -> None:
    """Let all ranks raise where they are not at the same place of the same data.

    Args:
        place: is compared.
        what: is at that place, as the user knows it.

    Raises:
        StateError: shows the places of all ranks.
    """
    places = group.all_gather_object(place)
    if any(other != places[0] for other in places):
        rows = "\n".join(f"  rank {rank}: {other}" for rank, other in enumerate(places))
        raise StateError(
            f"the ranks of group {group.name!r} do not read the same data:\n{rows}\n"
            f"Make the {what} alike on all of them, and load the same state."
        )


def epochs_left(epochs: int | None, total_epochs: int | None, epoch: int) -> int | None:
    """How many epochs a loop reads that begins in ``epoch``; None: no end.

    Raises:
        ArgumentError: both numbers are given, or one is none.

    Example:
        >>> epochs_left(1, 3, epoch=2), epochs_left(1, 3, epoch=3), epochs_left(2, None, epoch=5)
        (1, 0, 2)
    """
    if total_epochs is None:
        return None if epochs is None else integer("epochs", epochs, low=1)
    if epochs != 1:
        raise ArgumentError(
            f"epochs is {epochs} and total_epochs {total_epochs}: give one of them, epochs to read "
            "so many more, total_epochs for those of the whole job"
        )
    return max(0, integer("total_epochs", total_epochs, low=1) - epoch)


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
