"""Point-to-point messages: one ring of bytes from each rank to each other one.

A message is a header and its bytes, streamed through the ring in pieces, so that a message may be
longer than the ring. The receiver looks for a posted receive with the same tag; a message that
nobody has asked for yet is put aside. ``_progress`` moves whatever can move and never waits;
threads that wait call it.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from echelon.errors import CollectiveMismatch, StateError
from echelon.world.shm.area import RING_CONTROL_NBYTES, Area, ring_nbytes
from echelon.world.shm.futex import fence
from echelon.world.work import Ticket, Work

__all__ = ["Mailbox"]

# tag, bytes of payload, code of the dtype, position among the sender's messages
_HEADER = struct.Struct("<qQII")
_HEADER_NBYTES = 64
_ALIGN = 64  # payloads are padded to this, so that headers never wrap
_PIECE = 1 << 18

_DTYPES = sorted((item for item in vars(torch).values() if isinstance(item, torch.dtype)), key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


@dataclass(slots=True, eq=False)
class _Item:
    """One message on its way out or in."""

    ticket: Ticket | None  # None: arrived before it was asked for
    peer: int
    tag: int
    payload: Tensor  # uint8, 1D
    dtype: torch.dtype
    num_moved: int = 0
    has_header: bool = False
    complete: bool = False
    error: CollectiveMismatch | None = None


class _Ring:
    """The bytes from one rank to another, seen from one of them."""

    def __init__(self, area: Area, src: int, dst: int) -> None:
        start = area.ring_start(src, dst)
        self.capacity = ring_nbytes(area.size)  # a power of two
        self._words = area._words
        self._head, self._tail = start // 4, start // 4 + 16
        self.data = area.segment.tensor(start + RING_CONTROL_NBYTES, self.capacity)

    @property
    def head(self) -> int:
        """Bytes written so far, modulo 2^32; written by the sender only."""
        return self._words[self._head]

    @property
    def tail(self) -> int:
        """Bytes read so far, modulo 2^32; written by the receiver only."""
        return self._words[self._tail]

    def num_filled(self) -> int:
        return (self.head - self.tail) & 0xFFFFFFFF

    def advance_head(self, nbytes: int) -> None:
        fence()  # the bytes before the count
        self._words[self._head] = (self.head + nbytes) & 0xFFFFFFFF

    def advance_tail(self, nbytes: int) -> None:
        fence()
        self._words[self._tail] = (self.tail + nbytes) & 0xFFFFFFFF


@final
class _MailWork(Work):
    def __init__(self, ticket: Ticket, mailbox: Mailbox, item: _Item) -> None:
        super().__init__(ticket)
        self._mailbox = mailbox
        self._item = item

    def done(self) -> bool:
        self._mailbox.progress()
        return self._item.complete

    def _wait(self, timeout: float | None) -> None:
        self._mailbox.wait(self._item, timeout)


@final
class Mailbox:
    """All messages between this rank and the others of its group."""

    def __init__(self, area: Area, timeout: float) -> None:
        self._area = area
        self._timeout = timeout
        self._lock = threading.Lock()
        self._outgoing: dict[int, deque[_Item]] = {peer: deque() for peer in area.peers}
        self._asked: dict[int, list[_Item]] = {peer: [] for peer in area.peers}  # posted receives
        self._early: dict[int, list[_Item]] = {peer: [] for peer in area.peers}
        self._arriving: dict[int, _Item] = {}
        self._rings_out = {peer: _Ring(area, area.rank, peer) for peer in area.peers}
        self._rings_in = {peer: _Ring(area, peer, area.rank) for peer in area.peers}
        self._thread: threading.Thread | None = None
        self._has_items = threading.Condition()
        self._closing = False

    def send(self, ticket: Ticket, tensor: Tensor, dst: int, tag: int) -> Work:
        """Start to send; complete when the last byte is in the ring."""
        self._check_open(ticket)
        item = _Item(ticket, dst, tag, _bytes(tensor), tensor.dtype)
        with self._lock:
            self._outgoing[dst].append(item)
        return self._started(item, ticket)

    def recv(self, ticket: Ticket, tensor: Tensor, src: int, tag: int) -> Work:
        """Start to receive the next message from ``src`` with this tag."""
        self._check_open(ticket)
        item = _Item(ticket, src, tag, _bytes(tensor), tensor.dtype)
        with self._lock:
            early = next((e for e in self._early[src] if e.tag == tag), None)
            if early is None:
                self._asked[src].append(item)
            else:
                self._match(early, item)
        return self._started(item, ticket)

    def probe(self, tag: int) -> int | None:
        """A rank whose message with this tag has begun to arrive and is not asked for yet."""
        self.progress()
        with self._lock:
            for peer, items in self._early.items():
                if any(item.tag == tag for item in items):
                    return peer
        return None

    def wait(self, item: _Item, timeout: float | None) -> None:
        """Move messages until ``item`` is complete."""
        area = self._area

        def ready() -> bool:
            self.progress()
            return item.complete

        def missing() -> list[int]:
            return [area.ranks[item.peer]]

        if not item.complete:
            seconds = self._timeout if timeout is None else timeout
            area.board.wait(ready, lambda: str(item.ticket), missing, seconds)
        if item.error is not None:
            raise item.error

    def progress(self) -> None:
        """Move whatever can move; never waits."""
        with self._lock:
            for peer in self._area.peers:
                moved = self._push(peer)
                moved |= self._pull(peer)
                if moved:
                    self._area.board.ring((self._area.ranks[peer],))

    def close(self) -> None:
        """Send what is still outgoing, then end the background thread."""
        area = self._area

        def unsent() -> list[int]:
            return [area.ranks[peer] for peer, items in self._outgoing.items() if items]

        def ready() -> bool:
            self.progress()
            return not unsent()

        if unsent():
            area.board.wait(
                ready, lambda: "the end of the world, with messages unsent,", unsent, self._timeout
            )
        self.abandon()

    def abandon(self) -> None:
        """End the background thread and drop what is outgoing."""
        with self._has_items:
            self._closing = True
            self._has_items.notify()
        if self._thread is not None:
            self._thread.join()

    def _check_open(self, ticket: Ticket) -> None:
        if self._closing:
            raise StateError(f"{ticket} cannot run, because this rank has closed the world")

    def _started(self, item: _Item, ticket: Ticket) -> Work:
        self.progress()
        if not item.complete and not ticket.blocking:
            with self._has_items:
                if self._thread is None:
                    name = f"messages of {self._area.name}"
                    self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
                    self._thread.start()
                self._has_items.notify()
        return _MailWork(ticket, self, item)

    def _loop(self) -> None:
        """Keep long messages moving while the owner computes."""
        board = self._area.board
        while not self._closing:
            with self._has_items:
                while not self._closing and not self._is_open():
                    self._has_items.wait()
            board.doze(self.progress)

    def _is_open(self) -> bool:
        with self._lock:
            return any(map(bool, (*self._outgoing.values(), *self._asked.values(), self._arriving)))

    def _push(self, peer: int) -> bool:
        """Move bytes of the first outgoing message to ``peer`` into the ring."""
        queue, ring = self._outgoing[peer], self._rings_out[peer]
        moved = False
        while queue:
            item = queue[0]
            assert item.ticket is not None
            room = ring.capacity - ring.num_filled()
            if not item.has_header:
                if room < _HEADER_NBYTES:
                    break
                fields = (item.tag, item.payload.numel(), _CODES[item.dtype], item.ticket.position)
                header = torch.frombuffer(bytearray(_HEADER.pack(*fields)), dtype=torch.uint8)
                at = ring.head % ring.capacity
                ring.data[at : at + header.numel()] = header
                ring.advance_head(_HEADER_NBYTES)
                item.has_header = moved = True
                room -= _HEADER_NBYTES
            left = item.payload.numel() - item.num_moved
            at = ring.head % ring.capacity
            count = min(left, room, ring.capacity - at, _PIECE)
            if count:
                ring.data[at : at + count].copy_(
                    item.payload[item.num_moved : item.num_moved + count]
                )
                item.num_moved += count
                ring.advance_head(count if count < left else _padded(count))
                moved = True
            if item.num_moved < item.payload.numel():
                if not count:
                    break
                continue
            item.complete = True
            queue.popleft()
        return moved

    def _pull(self, peer: int) -> bool:
        """Move bytes from the ring of ``peer`` to where they are wanted."""
        ring = self._rings_in[peer]
        moved = False
        while True:
            filled = ring.num_filled()
            fence()  # the count before the bytes
            item = self._arriving.get(peer)
            if item is None:
                if filled < _HEADER_NBYTES:
                    return moved
                item = self._arriving[peer] = self._open(peer, ring)
                moved = True
                continue
            left = item.payload.numel() - item.num_moved
            at = ring.tail % ring.capacity
            count = min(left, filled, ring.capacity - at, _PIECE)
            if count:
                target = item.payload[item.num_moved : item.num_moved + count]
                _copy(target, ring.data[at : at + count])
                item.num_moved += count
                ring.advance_tail(count if count < left else _padded(count))
                moved = True
            if item.num_moved < item.payload.numel():
                if not count:
                    return moved
                continue
            item.complete = True
            del self._arriving[peer]

    def _open(self, peer: int, ring: _Ring) -> _Item:
        """Read a header and find or make the place for its bytes."""
        at = ring.tail % ring.capacity
        raw = bytes(ring.data[at : at + _HEADER.size].numpy())
        tag, nbytes, code, position = _HEADER.unpack(raw)
        ring.advance_tail(_HEADER_NBYTES)
        dtype = _DTYPES[code]
        asked = next((item for item in self._asked[peer] if item.tag == tag), None)
        if asked is not None:
            self._asked[peer].remove(asked)
            if asked.payload.numel() == nbytes and asked.dtype == dtype:
                return asked
            asked.error = self._differs(asked, peer, position, dtype, nbytes)
            asked.complete = True
        early = _Item(None, peer, tag, torch.empty(nbytes, dtype=torch.uint8), dtype)
        if asked is None:
            self._early[peer].append(early)
        return early

    def _match(self, early: _Item, item: _Item) -> None:
        """Give a receive the message that came before it was asked for."""
        self._early[early.peer].remove(early)
        if early.payload.numel() != item.payload.numel() or early.dtype != item.dtype:
            item.error = self._differs(item, early.peer, -1, early.dtype, early.payload.numel())
            item.complete = True
        elif early.complete:
            _copy(item.payload, early.payload)
            item.complete = True
        else:  # the rest of it goes straight to the receiver's tensor
            _copy(item.payload[: early.num_moved], early.payload[: early.num_moved])
            item.num_moved = early.num_moved
            self._arriving[early.peer] = item

    def _differs(
        self, item: _Item, peer: int, position: int, dtype: torch.dtype, nbytes: int
    ) -> CollectiveMismatch:
        assert item.ticket is not None
        name = str(dtype).removeprefix("torch.")
        number = f" (#{position})" if position >= 0 else ""
        sent = f"send {name}[{nbytes // dtype.itemsize}] with tag {item.tag}{number}"
        calls = {self._area.rank: f"{item.ticket.call} at {item.ticket.place}", peer: sent}
        return CollectiveMismatch.of_message(self._area.name, calls)


def _copy(target: Tensor, source: Tensor) -> None:
    """Write a tensor whatever mode it was made in; whoever waits moves the messages of others."""
    with torch.inference_mode():
        target.copy_(source)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
