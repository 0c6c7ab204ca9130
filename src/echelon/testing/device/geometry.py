"""The bytes that a tensor covers in its storage."""

from __future__ import annotations

from functools import lru_cache

_MOST_RUNS = 64  # contiguous runs of a view that are told apart


@lru_cache(maxsize=4096)
def byte_ranges(
    sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, int], ...]:
    """Half-open ranges of bytes from the first element of a tensor on.

    Args:
        sizes: of the tensor.
        strides: of the tensor, in elements.
        itemsize: bytes of an element.

    Example:
        >>> byte_ranges((2, 3), (4, 1), 4)  # two rows of three, in rows of four
        ((0, 12), (16, 28))
    """
    if 0 in sizes:
        return ()
    run, rest = itemsize, list[tuple[int, int]]()
    for stride, n in sorted(
        (s * itemsize, n) for s, n in zip(strides, sizes, strict=True) if n > 1
    ):
        if stride == run and not rest:
            run *= n
        elif stride:
            rest.append((stride, n))
    starts = [0]
    for stride, n in rest:
        if len(starts) * n > _MOST_RUNS:
            return ((0, sum((n - 1) * stride for stride, n in rest) + run),)
        starts = [first + i * stride for first in starts for i in range(n)]
    return tuple((first, first + run) for first in starts)
