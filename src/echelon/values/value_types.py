"""The types of values and tensors that files can hold, on which writing and reading agree."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch

from echelon.errors import ArgumentError
from echelon.values.untrusted_json import brief

COMPLEX128 = "C128"

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "C64": torch.complex64,
        COMPLEX128: torch.complex128,
    }
)
# The dtypes of safetensors. It has no complex128, whose elements are pairs of F64 there.
FILE_DTYPES = frozenset(DTYPES) - {COMPLEX128}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in manifests: that of safetensors, where it has one.

    Example:
        >>> dtype_name(torch.bfloat16)
        'BF16'
    """
    if dtype not in _NAMES:
        known = ", ".join(str(known_dtype).removeprefix("torch.") for known_dtype in _NAMES)
        raise ArgumentError(f"{dtype} cannot be saved in a checkpoint: use one of {known}")
    return _NAMES[dtype]


TOO_MANY = 2**60  # elements or bytes: sums of several still fit into 64 bits
_MAX_DIMS = 64  # as in PyTorch and NumPy


def is_size(value: object, limit: int = TOO_MANY) -> bool:
    """Whether ``value`` is an int (and no bool) with 0 <= ``value`` < ``limit``."""
    return type(value) is int and 0 <= value < limit


def nbytes_of(dtype: str, shape: Sequence[int]) -> int:
    """The number of bytes of a tensor."""
    return prod(shape) * DTYPES[dtype].itemsize


def tensor_problem(
    dtype: object, shape: Sequence[object], dtypes: Container[str] = DTYPES
) -> str | None:
    """The reason why no tensor can have this shape and one of ``dtypes``; None if one can.

    Example:
        >>> tensor_problem("F32", [10**18])
        'the shape [1000000000000000000] has too many elements'
    """
    if type(dtype) is not str or dtype not in dtypes:
        return f"the dtype {brief(dtype)} is not known"
    if len(shape) > _MAX_DIMS or not all(map(is_size, shape)):
        return f"the shape {list(shape)!r:.80} is none"
    # An empty tensor has strides, too, which are products of its other dims.
    if nbytes_of(dtype, [max(dim, 1) for dim in cast(Sequence[int], shape)]) >= TOO_MANY:
        return f"the shape {list(shape)!r:.80} has too many elements"
    return None


MAX_DEPTH = 64  # nested containers
MAX_BITS = 4096  # of an int

# The scalars of NumPy as they are written: little-endian.
SCALARS: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
}
SCALAR_NAMES: Mapping[type, str] = {dtype.type: name for name, dtype in SCALARS.items()}
# Arrays are written as tensors.
ARRAYS = frozenset(map(np.dtype, SCALARS))
ARRAY_DTYPES = frozenset(torch.from_numpy(np.empty(0, dtype)).dtype for dtype in ARRAYS)

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}

_SIMPLE = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}


def is_simple(value: object) -> bool:
    """Whether ``value`` can be a key or a member of a set."""
    return type(value) in _SIMPLE or (type(value) is tuple and all(map(is_simple, value)))
