"""Values from JSON and tensors of unknown origin; ``values`` says which there are."""

from __future__ import annotations

import base64
import re
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar, cast, final

import numpy as np
import torch
from torch import Tensor

from echelon.errors import CheckpointCorrupt
from echelon.values.untrusted_json import Json, brief
from echelon.values.value_types import (
    ARRAY_DTYPES,
    MAX_BITS,
    MAX_DEPTH,
    SCALARS,
    TORCH_DTYPES,
    is_simple,
    is_size,
)

_MAX_ALIKE = 16  # keys with one hash; more make a dict slow, and somebody has looked for them
_HEX_INT = re.compile(rf"-?0x[0-9a-f]{{1,{MAX_BITS // 4}}}")
_HEX_BYTES = re.compile(r"(?:[0-9a-f]{2})*")
_DEVICE = re.compile(r"[a-z]+(?::[0-9]{1,3})?")

Kind = TypeVar("Kind")


@final
class Decoder:
    """One value on its way out of JSON.

    Args:
        tensors: by path.
        where: the JSON comes from, for errors.
    """

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self._tensors, self._where = tensors, where

    def decode(self, found: Json, depth: int = 0) -> object:
        """The value of a JSON value that is in ``depth`` containers."""
        if depth > MAX_DEPTH:
            self._refuse(f"nests more than {MAX_DEPTH} deep")
        if isinstance(found, list):
            return [self.decode(one, depth + 1) for one in found]
        if not isinstance(found, dict):
            return found
        form = next((key for key in found if key.startswith("$")), None)
        if form is None:
            return {key: self.decode(one, depth + 1) for key, one in found.items()}
        if form not in _FORMS or len(found) > 1:
            self._refuse(f"has an object of the form {brief(form)}, which is not known here")
        try:
            return _FORMS[form](self, found[form], depth + 1)
        except ValueError:
            problem = f"has a {form} of {brief(found[form])}, which there cannot be"
        self._refuse(problem)

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointCorrupt(what, self._where)

    def list_of(self, found: Json, depth: int) -> list[object]:
        """The values of an array."""
        return [self.decode(one, depth) for one in _as(list, found)]

    def members_of(self, found: Json, depth: int) -> list[Any]:
        """The different values of an array, which can be keys."""
        members = self.list_of(found, depth)
        if not all(map(is_simple, members)):
            raise ValueError
        hashes = sorted(map(hash, members))
        if any(one == other for one, other in zip(hashes, hashes[_MAX_ALIKE:], strict=False)):
            raise ValueError
        if len(set(members)) != len(members):
            raise ValueError
        return members

    def dict_of(self, found: Json, depth: int) -> dict[Any, object]:
        """The dict of an array of keys and values."""
        pairs = [_as(list, pair) for pair in _as(list, found)]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError
        keys = self.members_of([key for key, _ in pairs], depth)
        values = [self.decode(value, depth) for _, value in pairs]
        return dict(zip(keys, values, strict=True))

    def deque_of(self, found: Json, depth: int) -> deque[object]:
        """The deque of an array of its values and its greatest length."""
        values, most = _as(list, found)
        if most is not None and not is_size(most):
            raise ValueError
        made = deque(self.list_of(values, depth), cast(int | None, most))
        if len(made) != len(cast(list[Json], values)):
            raise ValueError
        return made

    def tensor_of(self, found: Json, depth: int) -> Tensor:
        """The tensor of a path."""
        path = _as(str, found)
        try:
            return self._tensors[path]
        except KeyError:
            pass
        self._refuse(f"has no tensor {brief(path)}")

    def array_of(self, found: Json, depth: int) -> np.ndarray[Any, Any]:
        """The array in the memory of the tensor of a path."""
        tensor = self.tensor_of(found, depth)
        if tensor.dtype not in ARRAY_DTYPES:
            raise ValueError
        return cast(np.ndarray[Any, Any], tensor.numpy())


def _as(kind: type[Kind], found: object) -> Kind:
    """``found``, if it is exactly of this type."""
    if type(found) is not kind:
        raise ValueError
    return found


def _int(found: Json) -> int:
    """A whole number, in JSON or as ``$int``."""
    if type(found) is int:
        return found
    ((form, digits),) = _as(dict, found).items()
    if form != "$int" or _HEX_INT.fullmatch(_as(str, digits)) is None:
        raise ValueError
    return int(digits, 16)


def _float(found: Json) -> float:
    """A float, in JSON or as ``$float``."""
    if type(found) is float:
        return found
    ((form, bits),) = _as(dict, found).items()
    data = _bytes_of_hex(bits)
    if form != "$float" or len(data) != 8:
        raise ValueError
    (value,) = struct.unpack(">d", data)
    return cast(float, value)


def _bytes_of_hex(found: Json) -> bytes:
    if _HEX_BYTES.fullmatch(_as(str, found)) is None:
        raise ValueError
    return bytes.fromhex(_as(str, found))


def _complex(found: Json) -> complex:
    real, imag = map(_float, _as(list, found))
    return complex(real, imag)


def _bytes(found: Json) -> bytes:
    return base64.b64decode(_as(str, found), validate=True)


def _range(found: Json) -> range:
    start, stop, step = map(_int, _as(list, found))
    return range(start, stop, step)


def _scalar(found: Json) -> np.generic:
    name, digits = _as(list, found)
    data, dtype = _bytes_of_hex(digits), SCALARS.get(_as(str, name))
    if dtype is None or len(data) != dtype.itemsize or (name == "bool" and data > b"\x01"):
        raise ValueError
    return cast(np.generic, np.frombuffer(data, dtype)[0])


def _dtype(found: Json) -> torch.dtype:
    if _as(str, found) not in TORCH_DTYPES:
        raise ValueError
    return TORCH_DTYPES[_as(str, found)]


def _device(found: Json) -> torch.device:
    if _DEVICE.fullmatch(_as(str, found)) is None:
        raise ValueError
    try:
        device = torch.device(_as(str, found))
    except RuntimeError as error:
        raise ValueError from error
    if str(device) != found:  # an index that torch has no room for
        raise ValueError
    return device


def _size(found: Json) -> torch.Size:
    dims = _as(list, found)
    if not all(map(is_size, dims)):
        raise ValueError
    return torch.Size(cast(list[int], dims))


# By form: the value of what it has, in so many containers. What there cannot be is a ValueError.
_FORMS: Mapping[str, Callable[[Decoder, Json, int], object]] = {
    "$int": lambda decoder, found, depth: _int({"$int": found}),
    "$float": lambda decoder, found, depth: _float({"$float": found}),
    "$complex": lambda decoder, found, depth: _complex(found),
    "$bytes": lambda decoder, found, depth: _bytes(found),
    "$range": lambda decoder, found, depth: _range(found),
    "$scalar": lambda decoder, found, depth: _scalar(found),
    "$dtype": lambda decoder, found, depth: _dtype(found),
    "$device": lambda decoder, found, depth: _device(found),
    "$size": lambda decoder, found, depth: _size(found),
    "$tuple": lambda decoder, found, depth: tuple(decoder.list_of(found, depth)),
    "$deque": Decoder.deque_of,
    "$set": lambda decoder, found, depth: set(decoder.members_of(found, depth)),
    "$frozenset": lambda decoder, found, depth: frozenset(decoder.members_of(found, depth)),
    "$dict": Decoder.dict_of,
    "$ordered": lambda decoder, found, depth: OrderedDict(decoder.dict_of(found, depth)),
    "$counter": lambda decoder, found, depth: Counter(decoder.dict_of(found, depth)),
    "$tensor": Decoder.tensor_of,
    "$ndarray": Decoder.array_of,
}


def decode(found: Json, tensors: Mapping[str, Tensor], where: str) -> object:
    """The value that ``encode`` gave this JSON and these tensors for.

    Tensors are asked for by their paths as they are met, and are not copied: arrays share their
    memory.

    Args:
        where: the file and place that they come from, for errors.

    Raises:
        CheckpointCorrupt: ``encode`` gives no such JSON, or a tensor is not there.

    Example:
        >>> decode({"betas": {"$tuple": [0.9, 0.95]}}, {}, "optimizer")
        {'betas': (0.9, 0.95)}
    """
    return Decoder(tensors, where).decode(found, 0)
