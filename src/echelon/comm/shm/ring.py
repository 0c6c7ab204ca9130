"""The bytes of messages on their way from one rank to another, in shared memory."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from echelon.comm.shm.area import RING_CONTROL_NBYTES, Area, ring_nbytes
from echelon.comm.shm.futex import fence
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CollectiveMismatch

# tag, bytes of payload, code of the dtype, position among the sender's messages
_HEADER = struct.Struct("<qQII")
HEADER_NBYTES = 64
_ALIGN = 64  # payloads are padded to this, so that headers never wrap
_PIECE = 1 << 18
# Lets other threads run meanwhile, and knows nothing of the mode that a tensor was made in.
_move = ctypes.memmove

_DTYPES = sorted((item for item in vars(torch).values() if isinstance(item, torch.dtype)), key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


@final
@dataclass(slots=True, eq=False)
class RingMessage:
    """One message on its way out or in."""

    call: CollectiveCall | None  # None: arrived before it was asked for
    peer: int
    tag: int
    memory: Tensor  # 1D
    dtype: torch.dtype  # of what was sent
    nbytes: int
    address: int
    num_moved: int = 0
    has_header: bool = False
    complete: bool = False
    error: CollectiveMismatch | None = None

    @classmethod
    def of(cls, call: CollectiveCall | None, peer: int, tag: int, memory: Tensor) -> RingMessage:
        """One whose bytes are in ``memory``, or will be."""
        dtype, nbytes = memory.dtype, memory.numel() * memory.element_size()
        return cls(call, peer, tag, memory, dtype, nbytes, memory.data_ptr())

    @classmethod
    def unasked(cls, peer: int, tag: int, dtype: torch.dtype, nbytes: int) -> RingMessage:
        """One that came before its receiver wanted it."""
        memory = torch.empty(nbytes, dtype=torch.uint8)
        return cls(None, peer, tag, memory, dtype, nbytes, memory.data_ptr())

    def take_over(self, early: RingMessage) -> None:
        """Have what ``early``, of the same length, has got so far."""
        _move(self.address, early.address, early.num_moved)
        self.num_moved = early.num_moved

    @property
    def num_left(self) -> int:
        """Bytes that have not been moved."""
        return self.nbytes - self.num_moved


@final
class Ring:
    """The bytes from one rank to another, seen from one of them."""

    def __init__(self, area: Area, src: int, dst: int) -> None:
        start = area.ring_start(src, dst)
        self.capacity = ring_nbytes(area.size)  # a power of two
        self._words = area._words
        self._head, self._tail = start // 4, start // 4 + 16
        self._starved = self._head + 1
        first = start + RING_CONTROL_NBYTES
        self._data = area.segment.tensor(first, self.capacity)
        self._address = self._data.data_ptr()
        self._bytes = area._bytes[first : first + self.capacity]

    @property
    def head(self) -> int:
        """Bytes written so far, modulo 2^32; written by the sender only."""
        return self._words[self._head]

    @property
    def tail(self) -> int:
        """Bytes read so far, modulo 2^32; written by the receiver only."""
        return self._words[self._tail]

    @property
    def starved(self) -> bool:
        """Whether the sender waits for room; written by the sender only."""
        return self._words[self._starved] != 0

    @starved.setter
    def starved(self, value: bool) -> None:
        self._words[self._starved] = value
        fence()  # the receiver must see it before we look for room once more

    def num_filled(self) -> int:
        """Bytes that may be read."""
        return (self.head - self.tail) & 0xFFFFFFFF

    def write_header(self, item: RingMessage) -> None:
        """Fill the next bytes, and count them as written."""
        assert item.call is not None
        fields = item.tag, item.nbytes, _CODES[item.dtype], item.call.position
        _HEADER.pack_into(self._bytes, self.head % self.capacity, *fields)
        self.advance_head(HEADER_NBYTES)

    def read_header(self) -> tuple[int, int, torch.dtype, int]:
        """What ``write_header`` wrote: tag, bytes, dtype, position."""
        tag, nbytes, code, position = _HEADER.unpack_from(self._bytes, self.tail % self.capacity)
        self.advance_tail(HEADER_NBYTES)
        return tag, nbytes, _DTYPES[code], position

    def write(self, item: RingMessage, room: int) -> int:
        """Move as many bytes of ``item`` as there is room for in one stretch; how many."""
        at, left = self.head % self.capacity, item.num_left
        count = min(left, room, self.capacity - at, _PIECE)
        if count:
            _move(self._address + at, item.address + item.num_moved, count)
            item.num_moved += count
            self.advance_head(count if count < left else _padded(count))
        return count

    def read(self, item: RingMessage, filled: int) -> int:
        """Move as many bytes to ``item`` as there are in one stretch; how many."""
        at, left = self.tail % self.capacity, item.num_left
        count = min(left, filled, self.capacity - at, _PIECE)
        if count:
            _move(item.address + item.num_moved, self._address + at, count)
            item.num_moved += count
            self.advance_tail(count if count < left else _padded(count))
        return count

    def advance_head(self, nbytes: int) -> None:
        fence()  # the bytes before the count
        self._words[self._head] = (self.head + nbytes) & 0xFFFFFFFF

    def advance_tail(self, nbytes: int) -> None:
        fence()
        self._words[self._tail] = (self.tail + nbytes) & 0xFFFFFFFF


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
