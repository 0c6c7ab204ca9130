"""Several small tensors and a head in one message; large ones travel alone and uncopied."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import final

import torch
from torch import Tensor

from echelon.pipeline.boundary import TensorForm

__all__ = ["Packet"]

# A message costs as much time as a copy of so many bytes, or more.
SMALL = 1 << 15
_ALIGN = 16  # the longest element


@final
class Packet:
    """The memory of one message, zero at first.

    ::

        head ─ small ─ small ...      each at a multiple of 16 bytes

    Args:
        head: bytes of it.
        forms: of all tensors; those of at most 32 KiB have room here.
    """

    def __init__(self, head: int, forms: tuple[TensorForm, ...], device: torch.device) -> None:
        self._head = head
        self._places, nbytes = _layout(head, forms)
        self._forms = forms
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)

    @property
    def head(self) -> Tensor:
        """The first bytes."""
        return self.bytes[: self._head]

    def number(self) -> int:
        """The head, if it is one number of 64 bits."""
        return int(self.bytes.view(torch.int64)[0].item())

    def room(self, index: int) -> Tensor | None:
        """Where the tensor of this index lies; None if it is large."""
        place = self._places[index]
        if place is None:
            return None
        form, (offset, strides) = self._forms[index], place
        return self.bytes.view(form.dtype).as_strided(form.shape, strides, offset)

    @property
    def large(self) -> Sequence[TensorForm]:
        """The forms of the tensors that travel alone, in order."""
        pairs = zip(self._forms, self._places, strict=True)
        return [form for form, place in pairs if place is None]


_Place = tuple[int, tuple[int, ...]]  # in a packet of elements of its dtype: the first, strides


@lru_cache(maxsize=1024)
def _layout(head: int, forms: tuple[TensorForm, ...]) -> tuple[tuple[_Place | None, ...], int]:
    """The place of each small tensor, None for large ones; and the length of all in bytes.

    Example:
        >>> small = TensorForm((3,), torch.float32, False)
        >>> _layout(8, (small, TensorForm((9999,), torch.int64, False), small))
        (((4, (1,)), None, (8, (1,))), 48)
    """
    places: list[_Place | None] = []
    end = _aligned(head)
    for form in forms:
        if form.nbytes > SMALL:
            places.append(None)
            continue
        places.append((end // form.dtype.itemsize, _strides(form.shape)))
        end = _aligned(end + form.nbytes)
    return tuple(places), end


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of a contiguous tensor."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(1, length)
    return tuple(reversed(strides))
