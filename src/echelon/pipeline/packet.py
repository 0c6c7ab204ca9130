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

    def room(self, index: int) -> Tensor | None:
        """Where the tensor of this index lies; None if it is large."""
        place = self._places[index]
        if place is None:
            return None
        form, (start, stop) = self._forms[index], place
        return self.bytes[start:stop].view(form.dtype).view(form.shape)

    @property
    def large(self) -> Sequence[TensorForm]:
        """The forms of the tensors that travel alone, in order."""
        pairs = zip(self._forms, self._places, strict=True)
        return [form for form, place in pairs if place is None]


@lru_cache(maxsize=1024)
def _layout(
    head: int, forms: tuple[TensorForm, ...]
) -> tuple[tuple[tuple[int, int] | None, ...], int]:
    """First and last byte of each small tensor, None for large ones; and the length of all.

    Example:
        >>> small = TensorForm((3,), torch.float32, False)
        >>> _layout(8, (small, TensorForm((9999,), torch.int64, False), small))
        (((16, 28), None, (32, 44)), 44)
    """
    places: list[tuple[int, int] | None] = []
    end = head
    for form in forms:
        nbytes = form.nbytes
        if nbytes > SMALL:
            places.append(None)
            continue
        start = -(-end // _ALIGN) * _ALIGN
        end = start + nbytes
        places.append((start, end))
    return tuple(places), end
