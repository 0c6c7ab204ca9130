"""Which dtypes can be saved, under which names: those that safetensors has."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from echelon.errors import ArgumentError

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
    }
)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The name of ``dtype`` in files.

    Raises:
        ArgumentError: safetensors has no such dtype.

    Example:
        >>> dtype_name(torch.bfloat16)
        'BF16'
    """
    if dtype not in _NAMES:
        known = ", ".join(str(one).removeprefix("torch.") for one in _NAMES)
        advice = "give torch.view_as_real of it" if dtype.is_complex else f"use one of {known}"
        raise ArgumentError(f"{dtype} cannot be saved in a checkpoint: {advice}")
    return _NAMES[dtype]
