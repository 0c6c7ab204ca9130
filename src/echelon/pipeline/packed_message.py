"""Packs small tensors and a header into one message; large tensors travel alone and uncopied."""

from __future__ import annotations

from functools import lru_cache
from typing import final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from echelon.pipeline.boundary import TensorSpec

# A message of its own costs about as much time as a copy of so many bytes.
MAX_PACKED_NBYTES = 1 << 15
_ALIGNMENT = 16  # bytes of the longest element


@final
class PackedMessage:
    """The buffer of one message with a header and small tensors, zero at first.

    ::

        header ─ small ─ small ...      each at a multiple of 16 bytes

    Attributes:
        buffer: the whole message. 1D
        header: its first bytes.
        length: the header as one number, if it has 8 bytes.
        views: the room of each tensor; None for tensors of more than 32 KiB.
        large_specs: the specs of these, which travel alone, in order.
        about: what the message has, for somebody who looks at it.
    """

    def __init__(
        self, header_nbytes: int, specs: tuple[TensorSpec, ...], device: torch.device
    ) -> None:
        self.key = header_nbytes, specs
        self.about = ""
        layout, nbytes = _message_layout(header_nbytes, specs)
        self.buffer = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self.header = self.buffer[:header_nbytes]
        self.length = self.buffer.view(torch.int64)[:1]
        self.views = [
            None
            if place is None
            else self.buffer.view(spec.dtype).as_strided(spec.shape, place[1], place[0])
            for spec, place in zip(specs, layout, strict=True)
        ]
        _by_address[self.buffer.data_ptr()] = self
        self.large_specs = [
            spec for spec, view in zip(specs, self.views, strict=True) if view is None
        ]


# So that somebody who sees a buffer knows what is in it.
_by_address: WeakValueDictionary[int, PackedMessage] = WeakValueDictionary()


def packed_message_at(buffer: Tensor) -> PackedMessage | None:
    """The message whose buffer this is, or None."""
    message = _by_address.get(buffer.data_ptr())
    if message is None or message.buffer.numel() != buffer.numel():
        return None
    return message


_Place = tuple[int, tuple[int, ...]]  # offset in elements of the tensor's dtype, and its strides


@lru_cache(maxsize=1024)
def _message_layout(
    header_nbytes: int, specs: tuple[TensorSpec, ...]
) -> tuple[tuple[_Place | None, ...], int]:
    """The place of each small tensor, None for large ones, and the length of the message in bytes.

    Example:
        >>> small = TensorSpec((3,), torch.float32, False)
        >>> _message_layout(8, (small, TensorSpec((9999,), torch.int64, False), small))
        (((4, (1,)), None, (8, (1,))), 48)
    """
    places: list[_Place | None] = []
    end = _align(header_nbytes)
    for spec in specs:
        if spec.nbytes > MAX_PACKED_NBYTES:
            places.append(None)
            continue
        places.append((end // spec.dtype.itemsize, _contiguous_strides(spec.shape)))
        end = _align(end + spec.nbytes)
    return tuple(places), end


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, stride = [], 1
    for length in reversed(shape):
        strides.append(stride)
        stride *= max(1, length)
    return tuple(reversed(strides))


@final
class MessagePool:
    """Messages that are not in use; every step needs those of the previous step again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[tuple[int, tuple[TensorSpec, ...]], list[PackedMessage]] = {}

    def acquire(self, header_nbytes: int, specs: tuple[TensorSpec, ...]) -> PackedMessage:
        """A message that is not in use, with the contents that its last user left."""
        free = self._free.get((header_nbytes, specs))
        return free.pop() if free else PackedMessage(header_nbytes, specs, self._device)

    def release(self, message: PackedMessage) -> None:
        """Take back a message that is no longer used."""
        self._free.setdefault(message.key, []).append(message)
