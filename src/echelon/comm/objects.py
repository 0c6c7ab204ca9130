"""Bytes and objects of unequal lengths, sent between ranks as tensors. Meant for set-up.

[Note: no pickle] Bytes of another rank are never unpickled, unless this rank's own call says
``pickle=True``. Unpickling runs code that the sender chose, and over a network the sender is
whoever holds the other end of a connection.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from echelon.checks import flag
from echelon.comm.buffers import from_bytes
from echelon.comm.object_bytes import checked_nbytes, from_object, to_object
from echelon.comm.torch_function import without_torch_function
from echelon.comm.work import Work
from echelon.errors import ArgumentError


class TensorGroup(Protocol):
    """The members of ``Group`` that the exchange of objects uses."""

    rank: int
    size: int
    ranks: tuple[int, ...]
    device: torch.device

    def broadcast(self, tensor: Tensor, src: int, *, label: str | None = ...) -> Work | None: ...

    def all_gather_single(
        self, output: Tensor, input: Tensor, async_op: bool = ..., *, label: str | None = ...
    ) -> Work | None: ...

    def all_gather(
        self,
        outputs: Sequence[Tensor],
        input: Tensor,
        async_op: bool = ...,
        *,
        label: str | None = ...,
    ) -> Work | None: ...

    def gather(
        self,
        tensor: Tensor,
        outputs: Sequence[Tensor] | None = ...,
        dst: int = ...,
        async_op: bool = ...,
        *,
        label: str | None = ...,
    ) -> Work | None: ...


_PICKLE_ADVICE = (
    "; or ask for pickle by name, with pickle=True in this call: it takes other classes, and runs "
    "whatever code another rank has put into what it sends"
)


def all_gather_bytes(group: TensorGroup, data: bytes, label: str) -> list[bytes]:
    """See ``Group.all_gather_bytes``."""
    return [_to_bytes(part) for part in _gather(group, _from_bytes(data), label)]


@without_torch_function
def gather_bytes(group: TensorGroup, data: bytes, dst: int, label: str) -> list[bytes] | None:
    """See ``Group.gather_bytes``."""
    sent = _from_bytes(data).to(group.device)
    numels = _lengths(group, sent, label)
    padded = sent.new_zeros(max(numels))  # a gather takes equal tensors
    padded[: sent.numel()] = sent
    is_target = group.rank == dst
    parts = [torch.empty_like(padded) for _ in numels] if is_target else None
    _wait(group.gather(padded, parts, dst, True, label=label))
    if parts is None:
        return None
    return [_to_bytes(part[:n].cpu()) for part, n in zip(parts, numels, strict=True)]


def gather_objects(group: TensorGroup, item: Any, by_pickle: bool, label: str | None) -> list[Any]:
    """See ``Group.all_gather_object``."""
    flag("pickle", by_pickle)
    name = "" if label is None else f": {label}"
    if by_pickle:
        parts = _gather(group, _pickled(item), f"pickled objects{name}")
        return [_unpickled(part) for part in parts]
    parts = _gather(group, _data_of(item), f"objects{name}")
    return [to_object(part, group.ranks[rank]) for rank, part in enumerate(parts)]


def broadcast_object(group: TensorGroup, item: Any, src: int, by_pickle: bool) -> Any:
    """See ``Group.broadcast_object``."""
    flag("pickle", by_pickle)
    label = "pickled object" if by_pickle else "object"
    data = torch.empty(0, dtype=torch.uint8, device="cpu")
    if group.rank == src:
        data = _pickled(item) if by_pickle else _data_of(item)
    length = torch.tensor([data.numel()], dtype=torch.int64, device=group.device)
    group.broadcast(length, src, label=f"{label} length")
    if group.rank != src:
        data = data.new_empty(checked_nbytes(int(length.item()), group.ranks[src]))
    data = data.to(group.device)
    group.broadcast(data, src, label=label)
    return _unpickled(data.cpu()) if by_pickle else to_object(data.cpu(), group.ranks[src])


@without_torch_function
def _gather(group: TensorGroup, data: Tensor, label: str) -> list[Tensor]:
    """The bytes of all ranks, on the CPU."""
    data = data.to(group.device)
    parts = [data.new_empty(numel) for numel in _lengths(group, data, label)]
    _wait(group.all_gather(parts, data, True, label=label))
    return [part.cpu() for part in parts]


def _lengths(group: TensorGroup, data: Tensor, label: str) -> list[int]:
    """The number of bytes of each rank. It is asynchronous, as all that is called here.

    So it runs on the thread of the group: the caller may be another one than that of the rank.
    """
    lengths = torch.zeros(group.size, dtype=torch.int64, device=group.device)
    length = torch.tensor([data.numel()], dtype=torch.int64, device=group.device)
    _wait(group.all_gather_single(lengths, length, True, label=f"lengths of {label}"))
    return [checked_nbytes(n, group.ranks[rank]) for rank, n in enumerate(lengths.tolist())]


def _from_bytes(data: bytes) -> Tensor:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise ArgumentError(f"data is {data!r:.80}; give bytes")
    return from_bytes(data)


def _to_bytes(data: Tensor) -> bytes:
    return data.numpy().tobytes()


def _wait(work: Work | None) -> None:
    assert work is not None, "async_op returns one"
    work.wait()


def _data_of(item: Any) -> Tensor:
    try:
        return from_object(item, "the object")
    except ArgumentError as error:
        raise ArgumentError(f"{error}{_PICKLE_ADVICE}") from None


def _pickled(item: Any) -> Tensor:
    try:
        return from_bytes(pickle.dumps(item))
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise ArgumentError(
            f"{item!r:.80} cannot be sent to other ranks ({error}): give what pickle takes"
        ) from error


def _unpickled(data: Tensor) -> Any:
    """Unpickle, which runs code of the sender; this rank's own call has asked for it."""
    return pickle.loads(data.numpy().tobytes())
