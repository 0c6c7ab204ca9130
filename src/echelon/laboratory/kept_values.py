"""Values as bytes that run no code when they are read, with the strides of their tensors.

The layout is::

    length of the JSON, 8 bytes | JSON | tensors, each at a multiple of 64 bytes

    {"value": X, "tensors": [[PATH, DTYPE, SHAPE, STRIDES, START], ...]}

X is as in ``echelon.values``. Kernels choose by strides how they compute, so a tensor gets back its
own: those of an image with channels last, or of rows of a larger tensor. Tensors whose elements
share memory, or lie far apart, come back contiguous, for which STRIDES is null.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from echelon.comm.buffers import is_expanded
from echelon.comm.object_bytes import flat_bytes
from echelon.comm.streams import device_of
from echelon.errors import ArgumentError, BlackboxCorrupt, CheckpointCorrupt
from echelon.values.decoding import decode
from echelon.values.encoding import Purpose, encode
from echelon.values.untrusted_json import read_json
from echelon.values.value_types import TOO_MANY, TORCH_DTYPES, is_size

KEPT = Purpose(is_done="kept by a black box", only_safetensors=False, max_values=1_000_000)

_LENGTH_NBYTES = 8
_ALIGN = 64  # as torch aligns memory
_MOST_SPREAD = 8  # how much more memory than its elements a tensor may span
_MEMORY_PER_BYTE = 512  # that reading one byte of JSON may take


def members(batch: object) -> object:
    """A dataclass or a mapping of another class as a plain dict; anything else as it is."""
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    if isinstance(batch, Mapping) and type(batch) is not dict:
        return dict(batch)
    return batch


def to_buffers(value: object, where: str) -> list[memoryview]:
    """The bytes of ``value``, which errors call ``where``; tensors in their own memory.

    Raises:
        ArgumentError: something in it cannot be kept, or is on a device.
    """
    encoded, tensors = encode(value, where, KEPT)
    rows: list[tuple[str, str, list[int], list[int] | None, int]] = []
    buffers: list[memoryview] = []
    end = 0  # of the tensors so far, from the end of the JSON
    for path, tensor in tensors.items():
        if not device_of(tensor.device).is_on_host(tensor):
            raise ArgumentError(
                f"{where} has a tensor on {tensor.device}, from which a copy would make each step "
                "wait: give the loader to box.steps, and move batches to the device in the loop"
            )
        dtype = str(tensor.dtype).removeprefix("torch.")
        rows.append((path, dtype, list(tensor.shape), _strides(tensor), end))
        data = flat_bytes(tensor).numpy().data
        buffers += [data, _padding(data.nbytes)]
        end = _aligned(end + data.nbytes)
    text = json.dumps({"value": encoded, "tensors": rows}, separators=(",", ":")).encode()
    head = len(text).to_bytes(_LENGTH_NBYTES, "little") + text
    return [memoryview(head), _padding(len(head)), *buffers]


def from_bytes(data: bytearray, where: str) -> Any:
    """The value of bytes that ``to_buffers`` has made.

    Raises:
        BlackboxCorrupt: they are no such bytes.
    """
    length = int.from_bytes(data[:_LENGTH_NBYTES], "little")
    if len(data) < _LENGTH_NBYTES or length > len(data) - _LENGTH_NBYTES:
        raise BlackboxCorrupt(f"has {len(data)} bytes and says {length} of JSON", where)
    text = bytes(data[_LENGTH_NBYTES : _LENGTH_NBYTES + length])
    begin = _aligned(_LENGTH_NBYTES + length)
    try:
        content = read_json(text, where, memory=_MEMORY_PER_BYTE * length + 2**20)
        if not isinstance(content, dict) or content.keys() != {"value", "tensors"}:
            raise BlackboxCorrupt("its JSON has another form", where)
        body = torch.frombuffer(data, dtype=torch.uint8)[begin:]
        return decode(content["value"], dict(_tensors(content["tensors"], body, where)), where)
    except CheckpointCorrupt as error:  # the errors of ``echelon.values``
        raise BlackboxCorrupt(str(error), where) from error


def _tensors(rows: Any, body: Tensor, where: str) -> Iterator[tuple[str, Tensor]]:
    for row in rows if isinstance(rows, list) else [rows]:
        if not isinstance(row, list) or len(row) != 5:
            raise BlackboxCorrupt("has a tensor without a form", where)
        path, name, shape, strides, start = row
        dtype = TORCH_DTYPES.get(name) if isinstance(name, str) else None
        is_known = dtype is not None and isinstance(path, str) and is_size(start)
        if not is_known or not _are_sizes(shape) or not (strides is None or _are_sizes(strides)):
            raise BlackboxCorrupt("has a tensor of another form", where)
        assert dtype is not None
        nbytes = prod(shape) * dtype.itemsize
        if nbytes >= TOO_MANY or start % _ALIGN or start + nbytes > body.numel():
            raise BlackboxCorrupt(f"has {body.numel()} bytes for its tensors", where)
        try:
            dense = body[start : start + nbytes].clone().view(dtype).view(shape)
            yield path, dense if strides is None else _with_strides(dense, strides)
        except (RuntimeError, ValueError) as error:
            problem = f"has a tensor that is none: {str(error).splitlines()[0]}"
            raise BlackboxCorrupt(problem, where) from error


def _with_strides(dense: Tensor, strides: list[int]) -> Tensor:
    """A copy of ``dense`` with other strides."""
    if len(strides) != dense.dim() or not _is_near(dense.shape, strides):
        raise ValueError(f"the strides {strides!r:.80} are none")
    return torch.empty_strided(dense.shape, strides, dtype=dense.dtype, device="cpu").copy_(dense)


def _strides(tensor: Tensor) -> list[int] | None:
    """The strides to keep; None if the tensor comes back contiguous."""
    if tensor.is_contiguous() or is_expanded(tensor):
        return None
    strides = list(tensor.stride())
    return strides if _is_near(tensor.shape, strides) else None


def _is_near(shape: Any, strides: list[int]) -> bool:
    """Whether the elements lie so near to each other that their memory is worth it."""
    span = 1 + sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
    return bool(prod(shape) > 0 and span <= _MOST_SPREAD * prod(shape))


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(map(is_size, values))


def _padding(nbytes: int) -> memoryview:
    return memoryview(bytes(_aligned(nbytes) - nbytes))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
