"""Bytes and objects of unequal lengths, sent between ranks as tensors; for set-up."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from echelon.world.flat import from_bytes, pickled
from echelon.world.randomness import draws_nothing
from echelon.world.work import Work

if TYPE_CHECKING:
    from echelon.world.group import Group

__all__ = ["broadcast_object", "gather_bytes", "gather_objects"]


def gather_bytes(group: Group, data: bytes, label: str) -> list[bytes]:
    """The ``data`` of every rank, in rank order."""
    return _gather(group, from_bytes(data), label)


def gather_objects(group: Group, item: Any) -> list[Any]:
    """The ``item`` of every rank, in rank order."""
    return [pickle.loads(one) for one in _gather(group, pickled(item), "objects")]


def broadcast_object(group: Group, item: Any, src: int) -> Any:
    """The ``item`` of rank ``src``, on every rank."""
    mine = torch.empty(0, dtype=torch.uint8)
    if group.rank == src:
        mine = pickled(item)
    length = torch.tensor([mine.numel()], dtype=torch.int64, device=group.device)
    group.broadcast(length, src, label="object length")
    if group.rank != src:
        mine = mine.new_empty(int(length.item()))
    data = mine.to(group.device)
    group.broadcast(data, src, label="object")
    return pickle.loads(data.cpu().numpy().tobytes())


@draws_nothing
def _gather(group: Group, data: Tensor, label: str) -> list[bytes]:
    mine = data.to(group.device)
    lengths = torch.zeros(group.size, dtype=torch.int64, device=group.device)
    length = torch.tensor([mine.numel()], dtype=torch.int64, device=group.device)
    # Asynchronous, on the group's own thread: the caller may be a thread beside that of the rank.
    _wait(group.all_gather_single(lengths, length, True, label=f"lengths of {label}"))
    parts = [mine.new_empty(n) for n in lengths.tolist()]
    _wait(group.all_gather(parts, mine, True, label=label))
    return [part.cpu().numpy().tobytes() for part in parts]


def _wait(work: Work | None) -> None:
    assert work is not None, "asked for by async_op"
    work.wait()
