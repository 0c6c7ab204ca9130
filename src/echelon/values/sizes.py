"""How large a tensor can be that somebody says there is."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import cast

from echelon.values.bounded import brief
from echelon.values.dtypes import DTYPES

TOO_MANY = 2**60  # of elements or bytes: the sum of two still fits into 64 bits
_MAX_DIMS = 64  # as in PyTorch and NumPy


def is_size(found: object, limit: int = TOO_MANY) -> bool:
    """Whether ``found`` is a whole number from 0 to less than ``limit``; a bool is none."""
    return type(found) is int and 0 <= found < limit


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return prod(shape) * DTYPES[dtype].itemsize


def tensor_problem(dtype: object, shape: Sequence[object]) -> str | None:
    """Why no tensor has this dtype and shape; None if one can.

    Example:
        >>> tensor_problem("F32", [10**18])
        'the shape [1000000000000000000] has too many elements'
    """
    if type(dtype) is not str or dtype not in DTYPES:
        return f"the dtype {brief(dtype)} is not known"
    if len(shape) > _MAX_DIMS or not all(map(is_size, shape)):
        return f"the shape {list(shape)!r:.80} is none"
    # An empty tensor has strides, too, which are products of its other dims.
    if nbytes_of(dtype, [max(dim, 1) for dim in cast(Sequence[int], shape)]) >= TOO_MANY:
        return f"the shape {list(shape)!r:.80} has too many elements"
    return None
