"""Objects as bytes that do nothing when they are read: the kinds of values that checkpoints hold.

::

    length of the JSON, 8 bytes | JSON | tensors, each at a multiple of 16 bytes

    {"value": X, "tensors": [[PATH, DTYPE, SHAPE, START], ...]}      X as in ``echelon.values``

Bytes that another rank sent are judged before anything is made from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from echelon.comm.allocation import available_nbytes
from echelon.errors import CheckpointCorrupt, CommError
from echelon.values.decoding import decode
from echelon.values.encoding import SENT, encode
from echelon.values.untrusted_json import read_json
from echelon.values.value_types import TOO_MANY, TORCH_DTYPES, is_size

_LENGTH_NBYTES = 8
_SMALL_NBYTES = 1 << 20  # so many are always there; to ask takes time
_ALIGN = 16  # the longest element
# Reading JSON takes at most so many bytes for one of its own, see ``values.bounded``.
_READING = 512


def checked_nbytes(nbytes: int, rank: int) -> int:
    """The length of an object, as another rank has said it, before there is memory for it.

    Args:
        rank: which said it, in the job.

    Raises:
        CommError: there can be no such object here.
    """
    if not (0 <= nbytes <= _SMALL_NBYTES or 0 <= nbytes < available_nbytes()):
        raise CommError(
            f"rank {rank} says that it sends an object of {nbytes} bytes, for which there is no "
            "memory here: send tensors by themselves, or free memory"
        )
    return nbytes


def from_object(item: Any, where: str) -> Tensor:
    """The bytes of ``item``. 1D uint8, on the CPU.

    Args:
        where: what the user calls it, for errors.

    Raises:
        ArgumentError: something in it is of another kind; names the place.
    """
    value, tensors = encode(item, where, SENT)
    rows: list[tuple[str, str, list[int], int]] = []
    end = 0  # behind the JSON
    for path, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((path, dtype, list(tensor.shape), end))
        end = _aligned(end + tensor.numel() * tensor.element_size())
    text = json.dumps({"value": value, "tensors": rows}, separators=(",", ":")).encode()
    begin = _aligned(_LENGTH_NBYTES + len(text))
    data = torch.zeros(begin + end, dtype=torch.uint8)
    head = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    data[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    for (_, _, _, start), tensor in zip(rows, tensors.values(), strict=True):
        flat = _flat_bytes(tensor)
        data[begin + start : begin + start + flat.numel()] = flat
    return data


def to_object(data: Tensor, rank: int) -> Any:
    """The object that ``from_object`` gave ``data`` for.

    Args:
        data: 1D uint8, on the CPU.
        rank: which sent it, in the job.

    Raises:
        CommError: these are the bytes of no object.
    """
    try:
        return _read(data, f"the object of rank {rank}")
    except CheckpointCorrupt as error:
        problem = str(error)
    raise CommError(f"rank {rank} sent what is no object: {problem}")


def _read(data: Tensor, where: str) -> Any:
    head = data[:_LENGTH_NBYTES].numpy().tobytes()
    length = int.from_bytes(head, "little")
    if len(head) < _LENGTH_NBYTES or length > data.numel() - _LENGTH_NBYTES:
        raise CheckpointCorrupt(f"it has {data.numel()} bytes and says {length} of JSON", where)
    text = data[_LENGTH_NBYTES : _LENGTH_NBYTES + length].numpy().tobytes()
    found = read_json(text, where, memory=_READING * length + 2**20)
    if not isinstance(found, dict) or found.keys() != {"value", "tensors"}:
        raise CheckpointCorrupt("its JSON has another form", where)
    body = data[_aligned(_LENGTH_NBYTES + length) :]
    return decode(found["value"], dict(_tensors(found["tensors"], body, where)), where)


def _tensors(rows: Any, body: Tensor, where: str) -> Iterator[tuple[str, Tensor]]:
    """Each tensor of an object, with memory of its own, by its path."""
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or len(row) != 4:
            raise CheckpointCorrupt("it has a tensor without a form", where)
        path, name, shape, start = row
        dtype = TORCH_DTYPES.get(name) if isinstance(name, str) else None
        known = dtype is not None and isinstance(path, str) and is_size(start)
        if not known or not isinstance(shape, list) or not all(map(is_size, shape)):
            raise CheckpointCorrupt("it has a tensor of another form", where)
        assert dtype is not None
        nbytes = prod(shape) * dtype.itemsize
        if nbytes >= TOO_MANY or start % _ALIGN or start + nbytes > body.numel():
            raise CheckpointCorrupt(f"it has {body.numel()} bytes for its tensors", where)
        try:
            yield path, body[start : start + nbytes].clone().view(dtype).view(shape)
        except RuntimeError as error:
            problem = f"it has a tensor that is none: {str(error).splitlines()[0]}"
            raise CheckpointCorrupt(problem, where) from error


def _flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU. 1D uint8."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().view(-1)
    return dense.view(torch.uint8) if dense.numel() else torch.empty(0, dtype=torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
