"""Which kinds of values there are in a checkpoint, as far as writing and reading must agree."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

MAX_DEPTH = 64  # containers inside of containers
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
ARRAYS = frozenset(np.dtype(name) for name in SCALARS if name != "complex128")
ARRAY_DTYPES = frozenset(torch.from_numpy(np.empty(0, dtype)).dtype for dtype in ARRAYS)

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    str(found).removeprefix("torch."): found
    for found in vars(torch).values()
    if isinstance(found, torch.dtype)
}

_SIMPLE = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device}


def is_simple(value: object) -> bool:
    """Whether ``value`` can be a key or a member of a set."""
    return type(value) in _SIMPLE or (type(value) is tuple and all(map(is_simple, value)))
