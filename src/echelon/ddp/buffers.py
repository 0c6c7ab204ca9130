"""Buffers of a model (running statistics): which changed, and making them equal again.

[Note: when buffers are sent]
A rank cannot know by itself whether the buffers of another one changed, and a broadcast that only
some ranks issue is a hang. So each rank writes "mine changed" into one extra number of the last
gradient bucket. After the reduction all ranks read the same sum, hence agree, at no extra
communication. The next forward in training mode sends the buffers if a rank said yes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor, nn

from echelon.comm.group import Group
from echelon.ddp.buckets import compute_buckets
from echelon.ranges import pack


@final
class Buffers:
    """The buffers of ``module``, and their state when the ranks last agreed.

    A buffer that is replaced (``module.mean = tensor``) is found, one that is registered later not.
    """

    def __init__(self, module: nn.Module) -> None:
        self._slots = [
            (submodule._buffers, name)
            for submodule in module.modules()
            for name, buffer in submodule._buffers.items()
            if buffer is not None
        ]
        self._known: list[tuple[Tensor, int]] = []
        self.remember()

    def __len__(self) -> int:
        return len(self._slots)

    def tensors(self) -> list[Tensor]:
        """The buffers as they are now."""
        return [tensor for home, name in self._slots if (tensor := home[name]) is not None]

    def changed(self) -> bool:
        """Whether a buffer was replaced or written since ``remember``."""
        now = self.tensors()
        return len(now) != len(self._known) or any(
            tensor is not known or tensor._version != version
            for tensor, (known, version) in zip(now, self._known, strict=True)
        )

    def remember(self) -> None:
        """Take the present state as the agreed one."""
        self._known = [(tensor, tensor._version) for tensor in self.tensors()]


@torch.no_grad()
def broadcast_coalesced(
    tensors: Sequence[Tensor], group: Group, src: int, chunk_bytes: int, label: str
) -> None:
    """Copy ``tensors`` of rank ``src`` to all ranks, in place; few, large broadcasts.

    Args:
        chunk_bytes: cap of the buffer that is made for one broadcast.
        label: what they are.
    """
    chunks = compute_buckets(
        [tensor.nbytes for tensor in tensors],
        chunk_bytes,
        kinds=[tensor.dtype for tensor in tensors],
        order=range(len(tensors)),
    )
    for chunk in chunks:
        parts = [tensors[i] for i in chunk]
        if len(parts) == 1 and parts[0].is_contiguous():
            group.broadcast(parts[0], src, label=label)
            continue
        place = pack([part.numel() for part in parts])
        flat = torch.empty(place.numel, dtype=parts[0].dtype, device=group.device)
        views = [
            flat[start : start + part.numel()].view(part.shape)
            for start, part in zip(place.starts, parts, strict=True)
        ]
        if group.rank == src:
            torch._foreach_copy_(views, parts)
        group.broadcast(flat, src, label=label)
        if group.rank != src:
            torch._foreach_copy_(parts, views)
