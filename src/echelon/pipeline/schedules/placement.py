"""Which rank holds which stage."""

from __future__ import annotations


def loop(ranks: int, chunks: int) -> tuple[int, ...]:
    """Stage j on rank j modulo ranks: after the last rank the model goes on at the first.

    Returns:
        the rank of each of the ``ranks * chunks`` stages.

    Example:
        >>> loop(3, 2)
        (0, 1, 2, 0, 1, 2)
    """
    return tuple(range(ranks)) * chunks


def v_shape(ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again: rank 0 holds both ends of the model.

    Example:
        >>> v_shape(3)
        (0, 1, 2, 2, 1, 0)
    """
    return snake(ranks, 2)


def snake(ranks: int, chunks: int) -> tuple[int, ...]:
    """The direction turns after each chunk, so two chunks that touch share a rank.

    Example:
        >>> snake(2, 3)
        (0, 1, 1, 0, 0, 1)
    """
    down = tuple(range(ranks))
    return tuple(rank for c in range(chunks) for rank in (down if c % 2 == 0 else down[::-1]))
