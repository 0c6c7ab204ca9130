"""Objects as bytes that run no code when they are read, of the types that checkpoints hold.

The layout is::

    length of the JSON, 8 bytes | JSON | tensors, each at a multiple of 16 bytes

    {"value": X, "tensors": [[PATH, DTYPE, SHAPE, START], ...]}      X as in ``echelon.values``

Bytes of another rank are checked before anything is made from them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from echelon.comm.buffers import available_nbytes, from_bytes
from echelon.errors import CheckpointCorrupt, CommError
from echelon.values.decoding import decode
from echelon.values.encoding import SENT, encode
from echelon.values.untrusted_json import read_json
from echelon.values.value_types import TOO_MANY, TORCH_DTYPES, is_size

_LENGTH_NBYTES = 8
_SMALL_NBYTES = 1 << 20  # is granted unasked: reading how much memory is free takes longer
_ALIGN = 16  # the itemsize of the largest dtype
_MEMORY_PER_BYTE = 512  # that reading one byte of JSON may take


def checked_nbytes(nbytes: int, rank: int) -> int:
    """Return the length that ``rank`` (in the job) announced, if there is memory for it."""
    if not (0 <= nbytes <= _SMALL_NBYTES or 0 <= nbytes < available_nbytes()):
        raise CommError(
            f"rank {rank} says that it sends an object of {nbytes} bytes, for which there is no "
            "memory here: send tensors by themselves, or free memory"
        )
    return nbytes


def from_object(item: Any, where: str) -> Tensor:
    """The bytes of ``item``, which errors call ``where``. 1D uint8, on the CPU."""
    value, tensors = encode(item, where, SENT)
    rows: list[tuple[str, str, list[int], int]] = []
    end = 0  # of the tensors so far, from the end of the JSON
    for path, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((path, dtype, list(tensor.shape), end))
        end = _aligned(end + tensor.numel() * tensor.element_size())
    text = json.dumps({"value": value, "tensors": rows}, separators=(",", ":")).encode()
    begin = _aligned(_LENGTH_NBYTES + len(text))
    data = torch.zeros(begin + end, dtype=torch.uint8, device="cpu")
    head = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    data[: len(head)] = from_bytes(head)
    for (_, _, _, start), tensor in zip(rows, tensors.values(), strict=True):
        flat = flat_bytes(tensor)
        data[begin + start : begin + start + flat.numel()] = flat
    return data


def to_object(data: Tensor, rank: int) -> Any:
    """The object whose bytes ``rank`` (in the job) sent. ``data``: 1D uint8, on the CPU."""
    head = data[:_LENGTH_NBYTES].numpy().tobytes()
    length = int.from_bytes(head, "little")
    if len(head) < _LENGTH_NBYTES or length > data.numel() - _LENGTH_NBYTES:
        raise _no_object(rank, f"it has {data.numel()} bytes and says {length} of JSON")
    text = data[_LENGTH_NBYTES : _LENGTH_NBYTES + length].numpy().tobytes()
    body = data[_aligned(_LENGTH_NBYTES + length) :]
    where = f"the object of rank {rank}"
    try:
        content = read_json(text, where, memory=_MEMORY_PER_BYTE * length + 2**20)
        if not isinstance(content, dict) or content.keys() != {"value", "tensors"}:
            raise _no_object(rank, "its JSON has another form")
        return decode(content["value"], dict(_tensors(content["tensors"], body, rank)), where)
    except CheckpointCorrupt as error:  # ``values`` checks bytes of files, too
        problem = str(error)
    raise _no_object(rank, problem)


def _no_object(rank: int, problem: str) -> CommError:
    return CommError(f"rank {rank} sent what is no object: {problem}")


def _tensors(rows: Any, body: Tensor, rank: int) -> Iterator[tuple[str, Tensor]]:
    """The path of each tensor of an object and a copy of the tensor."""
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or len(row) != 4:
            raise _no_object(rank, "it has a tensor without a form")
        path, name, shape, start = row
        dtype = TORCH_DTYPES.get(name) if isinstance(name, str) else None
        is_known = dtype is not None and isinstance(path, str) and is_size(start)
        if not is_known or not isinstance(shape, list) or not all(map(is_size, shape)):
            raise _no_object(rank, "it has a tensor of another form")
        assert dtype is not None
        nbytes = prod(shape) * dtype.itemsize
        if nbytes >= TOO_MANY or start % _ALIGN or start + nbytes > body.numel():
            raise _no_object(rank, f"it has {body.numel()} bytes for its tensors")
        try:
            yield path, body[start : start + nbytes].clone().view(dtype).view(shape)
        except RuntimeError as error:
            problem = f"it has a tensor that is none: {str(error).splitlines()[0]}"
            raise _no_object(rank, problem) from error


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor on the CPU; its own memory, if that has them in order. 1D uint8."""
    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if dense.numel() == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    # One element counts as contiguous with any stride, but torch views only stride 1 as bytes.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
