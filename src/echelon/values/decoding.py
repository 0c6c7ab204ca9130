"""Values from JSON and tensors of unknown origin, in the format of ``echelon.values``."""

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

# Keys with one hash. More of them make a dict slow, and occur only in files made for that purpose.
_MAX_COLLISIONS = 16
_HEX_INT = re.compile(rf"-?0x[0-9a-f]{{1,{MAX_BITS // 4}}}")
_HEX_BYTES = re.compile(r"(?:[0-9a-f]{2})*")
_DEVICE = re.compile(r"[a-z]+(?::[0-9]{1,3})?")

Kind = TypeVar("Kind")


@final
class Decoder:
    """Decodes one value; ``tensors`` are by path, and errors name ``where`` it comes from."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self._tensors, self._where = tensors, where

    def decode(self, encoded: Json, depth: int = 0) -> object:
        """Decode a JSON value that is nested in ``depth`` containers."""
        if depth > MAX_DEPTH:
            self._refuse(f"nests more than {MAX_DEPTH} deep")
        if isinstance(encoded, list):
            return [self.decode(item, depth + 1) for item in encoded]
        if not isinstance(encoded, dict):
            return encoded
        form = next((key for key in encoded if key.startswith("$")), None)
        if form is None:
            return {key: self.decode(item, depth + 1) for key, item in encoded.items()}
        if form not in _FORMS or len(encoded) > 1:
            self._refuse(f"has an object of the form {brief(form)}, which is not known here")
        try:
            return _FORMS[form](self, encoded[form], depth + 1)
        except ValueError:
            problem = f"has a {form} of {brief(encoded[form])}, which there cannot be"
        self._refuse(problem)

    def _refuse(self, what: str) -> NoReturn:
        raise CheckpointCorrupt(what, self._where)

    def list_of(self, encoded: Json, depth: int) -> list[object]:
        """The list of an array."""
        return [self.decode(item, depth) for item in _as(list, encoded)]

    def members_of(self, encoded: Json, depth: int) -> list[Any]:
        """The values of an array, which must differ and can be keys."""
        members = self.list_of(encoded, depth)
        if not all(map(is_simple, members)):
            raise ValueError
        hashes = sorted(map(hash, members))
        if any(
            first == other for first, other in zip(hashes, hashes[_MAX_COLLISIONS:], strict=False)
        ):
            raise ValueError
        if len(set(members)) != len(members):
            raise ValueError
        return members

    def dict_of(self, encoded: Json, depth: int) -> dict[Any, object]:
        """The dict of an array of pairs."""
        pairs = [_as(list, pair) for pair in _as(list, encoded)]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError
        keys = self.members_of([key for key, _ in pairs], depth)
        values = [self.decode(value, depth) for _, value in pairs]
        return dict(zip(keys, values, strict=True))

    def deque_of(self, encoded: Json, depth: int) -> deque[object]:
        """The deque of an array of its values and its ``maxlen``."""
        values, maxlen = _as(list, encoded)
        if maxlen is not None and not is_size(maxlen):
            raise ValueError
        items = deque(self.list_of(values, depth), cast(int | None, maxlen))
        if len(items) != len(cast(list[Json], values)):
            raise ValueError
        return items

    def tensor_of(self, encoded: Json, depth: int) -> Tensor:
        """The tensor that is saved under a path."""
        path = _as(str, encoded)
        try:
            return self._tensors[path]
        except KeyError:
            pass
        self._refuse(f"has no tensor {brief(path)}")

    def array_of(self, encoded: Json, depth: int) -> np.ndarray[Any, Any]:
        """The tensor that is saved under a path, as an array with the same memory."""
        tensor = self.tensor_of(encoded, depth)
        if tensor.dtype not in ARRAY_DTYPES:
            raise ValueError
        return cast(np.ndarray[Any, Any], tensor.numpy())


def _as(kind: type[Kind], encoded: object) -> Kind:
    """``encoded`` if it is exactly of this type; else ``ValueError``."""
    if type(encoded) is not kind:
        raise ValueError
    return encoded


def _int(encoded: Json) -> int:
    """An int, as JSON or as ``$int``."""
    if type(encoded) is int:
        return encoded
    ((form, digits),) = _as(dict, encoded).items()
    if form != "$int" or _HEX_INT.fullmatch(_as(str, digits)) is None:
        raise ValueError
    return int(digits, 16)


def _float(encoded: Json) -> float:
    """A float, as JSON or as ``$float``."""
    if type(encoded) is float:
        return encoded
    ((form, bits),) = _as(dict, encoded).items()
    data = _bytes_of_hex(bits)
    if form != "$float" or len(data) != 8:
        raise ValueError
    (value,) = struct.unpack(">d", data)
    return cast(float, value)


def _bytes_of_hex(encoded: Json) -> bytes:
    if _HEX_BYTES.fullmatch(_as(str, encoded)) is None:
        raise ValueError
    return bytes.fromhex(_as(str, encoded))


def _complex(encoded: Json) -> complex:
    real, imag = map(_float, _as(list, encoded))
    return complex(real, imag)


def _bytes(encoded: Json) -> bytes:
    return base64.b64decode(_as(str, encoded), validate=True)


def _range(encoded: Json) -> range:
    start, stop, step = map(_int, _as(list, encoded))
    return range(start, stop, step)


def _scalar(encoded: Json) -> np.generic:
    name, digits = _as(list, encoded)
    data, dtype = _bytes_of_hex(digits), SCALARS.get(_as(str, name))
    if dtype is None or len(data) != dtype.itemsize or (name == "bool" and data > b"\x01"):
        raise ValueError
    return cast(np.generic, np.frombuffer(data, dtype)[0])


def _dtype(encoded: Json) -> torch.dtype:
    if _as(str, encoded) not in TORCH_DTYPES:
        raise ValueError
    return TORCH_DTYPES[_as(str, encoded)]


def _device(encoded: Json) -> torch.device:
    if _DEVICE.fullmatch(_as(str, encoded)) is None:
        raise ValueError
    try:
        device = torch.device(_as(str, encoded))
    except RuntimeError as error:
        raise ValueError from error
    if str(device) != encoded:  # the index does not fit into torch's type
        raise ValueError
    return device


def _size(encoded: Json) -> torch.Size:
    dims = _as(list, encoded)
    if not all(map(is_size, dims)):
        raise ValueError
    return torch.Size(cast(list[int], dims))


# The decoders by form. They raise ``ValueError`` for content that their form does not allow.
_FORMS: Mapping[str, Callable[[Decoder, Json, int], object]] = {
    "$int": lambda decoder, encoded, depth: _int({"$int": encoded}),
    "$float": lambda decoder, encoded, depth: _float({"$float": encoded}),
    "$complex": lambda decoder, encoded, depth: _complex(encoded),
    "$bytes": lambda decoder, encoded, depth: _bytes(encoded),
    "$range": lambda decoder, encoded, depth: _range(encoded),
    "$scalar": lambda decoder, encoded, depth: _scalar(encoded),
    "$dtype": lambda decoder, encoded, depth: _dtype(encoded),
    "$device": lambda decoder, encoded, depth: _device(encoded),
    "$size": lambda decoder, encoded, depth: _size(encoded),
    "$tuple": lambda decoder, encoded, depth: tuple(decoder.list_of(encoded, depth)),
    "$deque": Decoder.deque_of,
    "$set": lambda decoder, encoded, depth: set(decoder.members_of(encoded, depth)),
    "$frozenset": lambda decoder, encoded, depth: frozenset(decoder.members_of(encoded, depth)),
    "$dict": Decoder.dict_of,
    "$ordered": lambda decoder, encoded, depth: OrderedDict(decoder.dict_of(encoded, depth)),
    "$counter": lambda decoder, encoded, depth: Counter(decoder.dict_of(encoded, depth)),
    "$tensor": Decoder.tensor_of,
    "$ndarray": Decoder.array_of,
}


def decode(encoded: Json, tensors: Mapping[str, Tensor], where: str) -> object:
    """Restore the value that ``encode`` wrote as this JSON and these tensors.

    Tensors are looked up by path when they are needed, and are not copied: arrays share their
    memory. Raise ``CheckpointCorrupt`` about the file and place ``where`` if ``encode`` cannot have
    written this.

    Example:
        >>> decode({"betas": {"$tuple": [0.9, 0.95]}}, {}, "optimizer")
        {'betas': (0.9, 0.95)}
    """
    return Decoder(tensors, where).decode(encoded, 0)
