"""A byte FIFO in shared memory, which carries the messages from one rank to another.

The sender writes a header and the bytes of each message, and counts them in the word ``head``; the
receiver counts what it has read in ``tail``. A message may be longer than the ring.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from echelon.comm.shm.area import RING_CONTROL_NBYTES, Area, ring_nbytes
from echelon.comm.shm.futex import fence
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CollectiveMismatch

# Tag, bytes of payload, code of the dtype, and position among the sender's messages.
_HEADER = struct.Struct("<qQII")
_HEADER_NBYTES = 64
_ALIGN = 64  # payloads are padded to this, so that no header wraps around
_MAX_PIECE_NBYTES = 1 << 18
_MASK = 0xFFFFFFFF  # of the counts, which are modulo 2^32
# memmove releases the GIL, and accepts tensors that were made in inference mode.
_move = ctypes.memmove

_DTYPES = sorted((item for item in vars(torch).values() if isinstance(item, torch.dtype)), key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


@final
@dataclass(slots=True, eq=False)
class RingMessage:
    """A message that is being sent or received.

    Attributes:
        call: the send or the receive; None for a message that arrived before its receive.
        peer: the other rank, in the group.
        memory: the bytes of the message, 1D.
        dtype: the dtype of the elements that were sent, or are expected.
        nbytes: the length of the message.
        num_moved: the bytes that have been written or read so far.
    """

    call: CollectiveCall | None
    peer: int
    tag: int
    memory: Tensor
    dtype: torch.dtype
    nbytes: int
    address: int
    num_moved: int = 0
    has_header: bool = False
    complete: bool = False
    error: CollectiveMismatch | None = None

    @classmethod
    def of(cls, call: CollectiveCall, peer: int, tag: int, memory: Tensor) -> RingMessage:
        """The message of a send or a receive of ``memory``."""
        return cls(call, peer, tag, memory, memory.dtype, memory.nbytes, memory.data_ptr())

    @classmethod
    def unexpected(cls, peer: int, header: Header) -> RingMessage:
        """A message that arrived before its receive."""
        memory = torch.empty(header.nbytes, dtype=torch.uint8, device="cpu")
        address = memory.data_ptr()
        return cls(None, peer, header.tag, memory, header.dtype, header.nbytes, address)

    def take_over(self, early: RingMessage) -> None:
        """Continue a receive that ``early`` began before it was posted."""
        _move(self.address, early.address, early.num_moved)
        self.num_moved = early.num_moved


class Header(NamedTuple):
    """The header of a message; ``position`` is its number among those of the sender, if known."""

    tag: int
    nbytes: int
    dtype: torch.dtype
    position: int | None


class _RingEnd:
    """What both ends of a ring know of it."""

    def __init__(self, area: Area, src: int, dst: int) -> None:
        start = area.ring_start(src, dst)
        self._capacity = ring_nbytes(area.size)  # a power of two
        self._words = area.words
        self._head, self._starved, self._tail = start // 4, start // 4 + 1, start // 4 + 16
        first = start + RING_CONTROL_NBYTES
        self._data = area.segment.tensor(first, self._capacity)
        self._address = self._data.data_ptr()
        self._bytes = area.bytes[first : first + self._capacity]
        self._count = 0  # the bytes that this end has written or read


@final
class RingWriter(_RingEnd):
    """The sender's end of a ring."""

    _is_starved = False

    @property
    def is_starved(self) -> bool:
        """Whether the sender waits for room; the receiver sees it, too."""
        return self._is_starved

    @is_starved.setter
    def is_starved(self, value: bool) -> None:
        self._words[self._starved] = self._is_starved = value
        fence()  # the receiver must see it before the sender looks for room once more

    def write(self, item: RingMessage) -> bool:
        """Write the header of ``item`` and one piece of it; return False if there is no room."""
        before, capacity = self._count, self._capacity
        room = capacity - ((before - self._words[self._tail]) & _MASK)
        if not item.has_header:
            if room < _HEADER_NBYTES:
                return False
            assert item.call is not None
            fields = item.tag, item.nbytes, _CODES[item.dtype], item.call.position
            _HEADER.pack_into(self._bytes, before % capacity, *fields)
            item.has_header = True
            self._count += _HEADER_NBYTES
            room -= _HEADER_NBYTES
        at, left = self._count % capacity, item.nbytes - item.num_moved
        if count := min(left, room, capacity - at, _MAX_PIECE_NBYTES):
            _move(self._address + at, item.address + item.num_moved, count)
            item.num_moved += count
            self._count += count if count < left else _padded(count)
        if self._count == before:
            return False
        fence()  # the bytes before the count
        self._words[self._head] = self._count & _MASK
        return True


@final
class RingReader(_RingEnd):
    """The receiver's end of a ring."""

    @property
    def is_starved(self) -> bool:
        """Whether the sender waits for room."""
        return self._words[self._starved] != 0

    def num_filled(self) -> int:
        """The number of bytes that can be read."""
        filled: int = (self._words[self._head] - self._count) & _MASK
        fence()  # the count before the bytes
        return filled

    def read_header(self) -> Header | None:
        """Read the header of the next message, if it is there; ``read`` counts it as read."""
        if self.num_filled() < _HEADER_NBYTES:
            return None
        at = self._count % self._capacity
        tag, nbytes, code, position = _HEADER.unpack_from(self._bytes, at)
        self._count += _HEADER_NBYTES
        return Header(tag, nbytes, _DTYPES[code], position)

    def read(self, item: RingMessage) -> bool:
        """Read one piece of ``item``; return False if neither it nor its header was there."""
        at, left = self._count % self._capacity, item.nbytes - item.num_moved
        if count := min(left, self.num_filled(), self._capacity - at, _MAX_PIECE_NBYTES):
            _move(item.address + item.num_moved, self._address + at, count)
            item.num_moved += count
            self._count += count if count < left else _padded(count)
        if self._words[self._tail] == self._count & _MASK:
            return False
        fence()  # the bytes before the count
        self._words[self._tail] = self._count & _MASK
        return True


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
