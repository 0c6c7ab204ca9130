"""What to save instead of something that a checkpoint cannot hold."""

from __future__ import annotations

import dataclasses
import datetime
from collections import defaultdict
from collections.abc import Iterator
from enum import Enum
from pathlib import PurePath

import numpy as np
import torch
from torch import Tensor, nn

# The first that fits counts, so subclasses come before their bases.
_BY_TYPE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (Enum, "its .value"),
    (nn.Parameter, "its .detach()"),
    (Tensor, "a plain torch.Tensor of its values"),
    (torch.Generator, "its get_state()"),
    (np.random.Generator, "its bit_generator.state"),
    (np.random.RandomState, "its get_state()"),
    (np.ndarray, "np.array(...) of it"),
    (np.generic, "its item()"),
    (type, "its name, and find the class by it after loading"),
    (PurePath, "str(...) of it"),
    ((datetime.date, datetime.time), "its isoformat()"),
    (datetime.timedelta, "its total_seconds()"),
    (defaultdict, "dict(...) of it, and make the defaultdict after loading"),
    ((bytearray, memoryview), "bytes(...) of it"),
    *((base, f"{base.__name__}(...) of it") for base in (dict, list, tuple, set, frozenset)),
    *((base, f"{base.__name__}(...) of it") for base in (str, bytes, int, float, complex)),
    (Iterator, "how far it has come, as a number"),
)
_OTHERWISE = "numbers, str, bytes, tensors, or lists, tuples, sets and dicts of these"


def advice_for(value: object) -> str:
    """What to give instead of ``value``, as the end of a sentence.

    Example:
        >>> advice_for(datetime.date(2026, 1, 1))
        'its isoformat()'
    """
    for kind, advice in _BY_TYPE:
        if isinstance(value, kind):
            return advice
    if callable(getattr(value, "state_dict", None)):
        return "its state_dict(), or the object itself under a name of its own"
    if dataclasses.is_dataclass(value):
        return "dataclasses.asdict(...) of it"
    if callable(value):
        return "its name, and find the function by it after loading"
    return _OTHERWISE
