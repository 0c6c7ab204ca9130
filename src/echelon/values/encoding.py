"""Values to JSON and tensors, in the format of ``echelon.values``."""

from __future__ import annotations

import base64
import dataclasses
import datetime
import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass

from echelon.errors import ArgumentError
from echelon.values.untrusted_json import Json
from echelon.values.value_types import (
    ARRAYS,
    MAX_BITS,
    MAX_DEPTH,
    SCALAR_NAMES,
    SCALARS,
    dtype_name,
    is_simple,
)

# Classes whose memory is that of a plain tensor, and which are saved as one.
TENSOR_CLASSES: set[type] = {Tensor}
_MAX_PATH = 512  # characters, because the names of tensors have a limit, too
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")  # keys that become part of a path unchanged


@final
@dataclass(frozen=True, kw_only=True)
class Purpose:
    """The purpose for which values are encoded.

    Attributes:
        is_done: the end of a message that begins with "cannot be".
        only_safetensors: whether tensors must have a dtype of safetensors.
        max_values: the greatest number of values.
    """

    is_done: str
    only_safetensors: bool
    max_values: int


SAVED = Purpose(is_done="saved in a checkpoint", only_safetensors=True, max_values=1_000_000)
SENT = Purpose(is_done="sent to other ranks", only_safetensors=False, max_values=1 << 40)


def _plain_tensor(value: Tensor) -> Tensor:
    if type(value) is Tensor:
        return value
    with DisableTorchFunctionSubclass():
        return value.as_subclass(Tensor)


@final
class Encoder:
    """Encodes one value; ``tensors`` has its tensors by path."""

    def __init__(self, purpose: Purpose = SAVED) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._purpose = purpose
        self._open: set[int] = set()  # the containers of the current value
        self._num_values = 0

    def encode(self, value: object, place: str, path: str) -> Json:
        """Encode the value at ``place``, which is Python code, with tensors under ``path``."""
        self._num_values += 1
        if self._num_values > self._purpose.max_values:
            raise ArgumentError(
                f"{place}: there are more than {self._purpose.max_values} values; give long lists "
                "as tensors"
            )
        if (simple := _SIMPLE.get(type(value))) is not None:
            try:
                return simple(value)
            except ValueError as error:
                raise ArgumentError(f"{place} {error}") from None
        if type(value) in TENSOR_CLASSES:
            assert isinstance(value, Tensor)
            return {"$tensor": self._tensor(_plain_tensor(value), place, path)}
        if type(value) is np.ndarray:
            return {"$ndarray": self._array(value, place, path)}
        container = _CONTAINERS.get(type(value))
        if container is None:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise ArgumentError(
                f"{place} is a {kind.removeprefix('builtins.')}, which cannot be "
                f"{self._purpose.is_done}: give {advice_for(value)}"
            )
        if id(value) in self._open:
            raise ArgumentError(f"{place} contains itself and cannot be {self._purpose.is_done}")
        if len(self._open) == MAX_DEPTH:
            raise ArgumentError(f"{place} is in more than {MAX_DEPTH} containers")
        self._open.add(id(value))
        encoded = container(self, value, place, path)
        self._open.remove(id(value))
        return encoded

    def list_of(self, values: Iterable[object], place: str, path: str) -> list[Json]:
        """The JSON of a sequence."""
        return [
            self.encode(value, f"{place}[{i}]", _join(path, str(i)))
            for i, value in enumerate(values)
        ]

    def set_of(self, values: Set[object], place: str, path: str) -> list[Json]:
        """The JSON of a set."""
        encoded = []
        for value in values:
            encoded.append(self.encode(value, f"{place}{{{value!r:.40}}}", path))
            self._check_simple(value, f"a member of {place}")
        return sorted(encoded, key=json.dumps)

    def dict_of(self, values: Mapping[Any, object], place: str, path: str) -> Json:
        """The JSON of a dict, which is an object if the keys allow it."""
        if any(type(key) is not str or key.startswith("$") for key in values):
            return {"$dict": self.pairs_of(values, place, path)}
        return {str(key): value for key, value in self._entries(values, place, path)}

    def pairs_of(self, values: Mapping[Any, object], place: str, path: str) -> list[Json]:
        """The JSON of a dict as pairs of keys and values."""
        return [[key, value] for key, value in self._entries(values, place, path)]

    def _entries(
        self, values: Mapping[Any, object], place: str, path: str
    ) -> Iterable[tuple[Json, Json]]:
        for i, (key, value) in enumerate(values.items()):
            encoded = self.encode(key, f"a key of {place}", path)
            self._check_simple(key, f"a key of {place}")
            plain = type(key) is str and _PLAIN.fullmatch(key) is not None
            child_place = (
                f"{place}.{key}" if plain and key.isidentifier() else f"{place}[{key!r:.40}]"
            )
            # Python refuses to write very long ints.
            short = type(key) is int and key.bit_length() < 64
            part = str(key) if plain or short else f"#{i}"
            yield encoded, self.encode(value, child_place, _join(path, part))

    @staticmethod
    def _check_simple(value: object, what: str) -> None:
        if not is_simple(value):
            raise ArgumentError(
                f"{what} is a {type(value).__name__}; give numbers, str, or tuples of these"
            )

    def _tensor(self, value: Tensor, place: str, path: str) -> str:
        """Add a tensor and return its path."""
        if value.layout is not torch.strided or value.is_quantized or value.is_nested:
            raise ArgumentError(
                f"{place} is a sparse, nested or quantized tensor; give a dense one of its values"
            )
        if value.is_meta:
            raise ArgumentError(f"{place} is a tensor on meta, which has no values to save")
        if self._purpose.only_safetensors:
            try:
                dtype_name(value.dtype)
            except ArgumentError as error:
                raise ArgumentError(f"{place}: {error}") from None
        # This is unique, because a path that begins with "#" has a number after it.
        path = path or "."
        path = path if len(path) <= _MAX_PATH else f"#/{len(self.tensors)}"
        self.tensors[path] = value
        return path

    def _array(self, value: np.ndarray[Any, Any], place: str, path: str) -> str:
        """Add an array as a tensor and return its path."""
        if value.dtype not in ARRAYS:
            raise ArgumentError(
                f"{place} is an array of {value.dtype}, which no tensor has: give it as one of "
                f"{', '.join(sorted(map(str, ARRAYS)))}"
            )
        flags = value.flags
        if not (flags.c_contiguous and flags.writeable and flags.aligned):
            value = value.copy(order="C")  # PyTorch takes no other memory without a warning
        return self._tensor(torch.from_numpy(value), place, path)


def _join(path: str, part: str) -> str:
    return f"{path}/{part}" if path else part


def _int(value: int) -> Json:
    if value.bit_length() > MAX_BITS:
        raise ValueError(f"has more than {MAX_BITS} bits; give its to_bytes()")
    return value if value.bit_length() < 64 else {"$int": hex(value)}


def _float(value: float) -> Json:
    return value if math.isfinite(value) else {"$float": struct.pack(">d", value).hex()}


def _str(value: str) -> Json:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError("holds a surrogate, which is no text; give os.fsencode() of it") from None
    return value


def _scalar(value: np.generic) -> Json:
    name = SCALAR_NAMES[type(value)]
    return {"$scalar": [name, np.array(value, SCALARS[name]).tobytes().hex()]}


# The encoders of values that hold no other values.
_SIMPLE: Mapping[type, Callable[[Any], Json]] = {
    type(None): lambda value: None,
    bool: lambda value: value,
    int: _int,
    float: _float,
    complex: lambda value: {"$complex": [_float(value.real), _float(value.imag)]},
    str: _str,
    bytes: lambda value: {"$bytes": base64.b64encode(value).decode()},
    range: lambda value: {"$range": [_int(value.start), _int(value.stop), _int(value.step)]},
    torch.Size: lambda value: {"$size": list(value)},
    torch.dtype: lambda value: {"$dtype": str(value).removeprefix("torch.")},
    torch.device: lambda value: {"$device": str(value)},
    **dict.fromkeys(SCALAR_NAMES, _scalar),
}

# The encoders of containers; they take the value, its place and its path.
_CONTAINERS: Mapping[type, Callable[[Encoder, Any, str, str], Json]] = {
    list: Encoder.list_of,
    dict: Encoder.dict_of,
    tuple: lambda encoder, *args: {"$tuple": encoder.list_of(*args)},
    deque: lambda encoder, value, *at: {"$deque": [encoder.list_of(value, *at), value.maxlen]},
    set: lambda encoder, *args: {"$set": encoder.set_of(*args)},
    frozenset: lambda encoder, *args: {"$frozenset": encoder.set_of(*args)},
    OrderedDict: lambda encoder, *args: {"$ordered": encoder.pairs_of(*args)},
    Counter: lambda encoder, *args: {"$counter": encoder.pairs_of(*args)},
}


# The first match is used, so subclasses come before their bases.
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
    """Advice for a value that cannot be encoded, as the end of a sentence.

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


def encode(value: object, where: str, purpose: Purpose = SAVED) -> tuple[Json, dict[str, Tensor]]:
    """Encode ``value`` as JSON, and its tensors by paths such as ``"state/0/mean"``.

    Tensors are not copied, nor are arrays that are contiguous and writable. An ``ArgumentError``
    names the place of a value that cannot be encoded, as part of ``where``, and what to give
    instead.

    Law: ``decode`` of both gives an equal value of the same types.

    Example:
        >>> encode({"betas": (0.9, 0.95)}, "optimizer")
        ({'betas': {'$tuple': [0.9, 0.95]}}, {})
    """
    encoder = Encoder(purpose)
    return encoder.encode(value, where, ""), encoder.tensors
