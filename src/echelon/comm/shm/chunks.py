"""Which part of a tensor each rank reduces for all."""

from __future__ import annotations

import torch

from echelon.ranges import even_chunks

_LINE_NBYTES = 64


def line_chunks(numel: int, dtype: torch.dtype, size: int) -> list[tuple[int, int]]:
    """One range of elements for each of ``size`` ranks, cut at cache lines.

    Else two cores would write to one line.

    Example:
        >>> line_chunks(40, torch.float32, 2)
        [(0, 32), (32, 40)]
    """
    return even_chunks(numel, size, max(1, _LINE_NBYTES // dtype.itemsize))
