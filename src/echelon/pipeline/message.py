"""Several small tensors and a head in one message; large ones travel alone and uncopied."""

from __future__ import annotations

from functools import lru_cache
from typing import final

import torch

from echelon.pipeline.boundary import TensorSpec

# A message costs as much time as a copy of so many bytes, or more.
SMALL = 1 << 15
_ALIGN = 16  # the longest element


@final
class StageMessage:
    """The memory of one message, zero at first.

    ::

        head ─ small ─ small ...      each at a multiple of 16 bytes

    Args:
        head: bytes of it.
        forms: of all tensors; those of at most 32 KiB have room here.

    Attributes:
        bytes: all of it. 1D
        head: the first bytes.
        number: the same as one number, of a head of 8 bytes.
        rooms: where each tensor lies; None if it is large.
        large: the forms of the tensors that travel alone, in order.
    """

    def __init__(self, head: int, forms: tuple[TensorSpec, ...], device: torch.device) -> None:
        self.kind = head, forms
        places, nbytes = _layout(head, forms)
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.head = self.bytes[:head]
        self.number = self.bytes.view(torch.int64)[:1]
        self.rooms = [
            None
            if place is None
            else self.bytes.view(form.dtype).as_strided(form.shape, place[1], place[0])
            for form, place in zip(forms, places, strict=True)
        ]
        self.large = [form for form, room in zip(forms, self.rooms, strict=True) if room is None]


@final
class MessageCodec:
    """Packets that are not in use: a step needs those of the step before again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spare: dict[tuple[int, tuple[TensorSpec, ...]], list[StageMessage]] = {}

    def take(self, head: int, forms: tuple[TensorSpec, ...]) -> StageMessage:
        """One that nobody uses; what it holds is what its last user left."""
        spare = self._spare.get((head, forms))
        return spare.pop() if spare else StageMessage(head, forms, self._device)

    def give_back(self, packet: StageMessage) -> None:
        """Its user is done with it."""
        self._spare.setdefault(packet.kind, []).append(packet)


_Place = tuple[int, tuple[int, ...]]  # in a packet of elements of its dtype: the first, strides


@lru_cache(maxsize=1024)
def _layout(head: int, forms: tuple[TensorSpec, ...]) -> tuple[tuple[_Place | None, ...], int]:
    """The place of each small tensor, None for large ones; and the length of all in bytes.

    Example:
        >>> small = TensorSpec((3,), torch.float32, False)
        >>> _layout(8, (small, TensorSpec((9999,), torch.int64, False), small))
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
