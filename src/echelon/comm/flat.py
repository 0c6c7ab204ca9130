"""Tensors of any shape, and bytes, as the 1D buffers that backends move."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def apart(part: Tensor, outputs: Sequence[Tensor], own: int | None = None) -> Tensor:
    """``part``, or a copy of it where an output lies on it, which others may still have to read.

    Args:
        own: the output that may be exactly ``part``: it is written with its own value.
    """
    if own is not None and _span(part) == _span(outputs[own]):
        return part
    first, last = _span(part)
    for start, stop in map(_span, outputs):
        if first < stop and start < last:
            return part.clone()
    return part


def _span(flat: Tensor) -> tuple[int, int]:
    """The addresses of a 1D buffer."""
    return flat.data_ptr(), flat.data_ptr() + flat.nbytes


def is_expanded(tensor: Tensor) -> bool:
    """Whether several of its elements are one place in memory, as after ``expand``."""
    return not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1


def flattened(tensor: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """``tensor`` as a 1D buffer; and where that had to be a copy, a step that copies it back."""
    data = tensor.detach()
    if data.is_contiguous() and not data.is_conj() and not data.is_neg():
        return data if data.dim() == 1 else data.view(-1), None
    buffer = data.resolve_conj().resolve_neg().contiguous().view(-1)

    def restore() -> None:
        data.copy_(buffer.view(data.shape))

    return buffer, restore


def from_bytes(data: bytes) -> Tensor:
    """The bytes as a tensor with memory of its own. 1D uint8."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
