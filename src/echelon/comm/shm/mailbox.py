"""Point-to-point messages: one ring of bytes from each rank to each other one.

A message is a header and its bytes, streamed through the ring in pieces, so that a message may be
longer than the ring. The receiver looks for a posted receive with the same tag; a message that
nobody has asked for yet is put aside. ``progress`` moves whatever can move and never waits; threads
that wait call it.

[Note: who moves long messages]
What fits in the ring waits there until its receiver looks. A sender that has more to say than there
is room for says so in a word beside the ring, and calls the receiver's helper; whoever reads from
such a ring calls the sender's. So long messages go on while both owners compute, and short ones
wake no thread but the one that waits for them::

    sender    fill | starved = 1, call | … helper: fill | starved = 1, call | … helper: fill, 0
    receiver              helper: read, call | …               helper: read, call | …
"""

from __future__ import annotations

import threading
from collections import deque
from typing import final

import torch
from torch import Tensor

from echelon.comm.shm.area import Area
from echelon.comm.shm.futex import fence
from echelon.comm.shm.ring import HEADER_NBYTES, Ring, RingMessage
from echelon.comm.work import Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CollectiveMismatch, CommTimeout, StateError

# The helper looks around this often uncalled; nothing depends on it.
_LOOK_S = 1.0


@final
class _MailWork(Work):
    def __init__(self, call: CollectiveCall, mailbox: Mailbox, item: RingMessage) -> None:
        super().__init__(call)
        self._mailbox = mailbox
        self._item = item

    def done(self) -> bool:
        if not self._item.complete:
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
        self._outgoing: dict[int, deque[RingMessage]] = {peer: deque() for peer in area.peers}
        self._asked: dict[int, list[RingMessage]] = {
            peer: [] for peer in area.peers
        }  # posted receives
        self._early: dict[int, list[RingMessage]] = {peer: [] for peer in area.peers}
        self._arriving: dict[int, RingMessage] = {}
        self._rings_out = {peer: Ring(area, area.rank, peer) for peer in area.peers}
        self._rings_in = {peer: Ring(area, peer, area.rank) for peer in area.peers}
        self._thread: threading.Thread | None = None
        self._closing = False

    def send(self, call: CollectiveCall, tensor: Tensor, dst: int, tag: int) -> Work:
        """Start to send; complete when the last byte is in the ring."""
        self._check_open(call)
        item = RingMessage.of(call, dst, tag, tensor)
        with self._lock:
            self._outgoing[dst].append(item)
            self._feed(dst)
        return self._started(item)

    def recv(self, call: CollectiveCall, tensor: Tensor, src: int, tag: int) -> Work:
        """Start to receive the next message from ``src`` with this tag."""
        self._check_open(call)
        item = RingMessage.of(call, src, tag, tensor)
        with self._lock:
            early = next((e for e in self._early[src] if e.tag == tag), None)
            if early is None:
                self._asked[src].append(item)
            else:
                self._match(early, item)
            if not item.complete:
                self._drain(src)
        return self._started(item)

    def probe(self, tag: int) -> int | None:
        """A rank whose message with this tag has begun to arrive and is not asked for yet."""
        self.progress()
        with self._lock:
            for peer, items in self._early.items():
                if any(item.tag == tag for item in items):
                    return peer
        return None

    def wait(self, item: RingMessage, timeout: float | None) -> None:
        """Move messages until ``item`` is complete."""
        area = self._area

        def ready() -> bool:
            self.progress()
            return item.complete

        def missing() -> list[int]:
            return [area.ranks[item.peer]]

        if not item.complete:
            seconds = self._timeout if timeout is None else timeout
            try:
                area.board.wait(ready, lambda: str(item.call), missing, seconds)
            except CommTimeout as error:
                # Who has a timeout of his own may wait again.
                raise area.board.monitor.explained(error) if timeout is None else error from None
        if item.error is not None:
            raise item.error

    def progress(self) -> None:
        """Move whatever can move; never waits."""
        with self._lock:
            for peer in self._area.peers:
                self._feed(peer)
                self._drain(peer)

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
        self._closing = True
        if self._thread is not None:
            self._area.board.call_helpers(self._area.ranks[self._area.rank])
            self._thread.join()

    def _check_open(self, call: CollectiveCall) -> None:
        if self._closing:
            raise StateError(f"{call} cannot run, because this rank has closed the world")

    def _started(self, item: RingMessage) -> Work:
        assert item.call is not None
        if not (item.complete or item.call.blocking or self._thread):
            name = f"messages of {self._area.name}"
            self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
            self._thread.start()
        return _MailWork(item.call, self, item)

    def _loop(self) -> None:
        """Keep long messages moving while the owner computes."""
        while not self._closing:
            self._area.board.help(self.progress, _LOOK_S)

    def _feed(self, peer: int) -> None:
        """``_push``, and call the receiver's helper if there is no room for all of it."""
        queue, ring = self._outgoing[peer], self._rings_out[peer]
        if not queue:
            return
        moved = news = self._push(peer)
        if queue and not ring.starved:
            ring.starved = news = True
            moved |= self._push(peer)  # the receiver may have made room before it could see that
        board, receiver = self._area.board, self._area.ranks[peer]
        if not queue and ring.starved:
            ring.starved = False
        if moved:
            board.ring((receiver,))
        if queue and news:
            board.call_helpers(receiver)

    def _drain(self, peer: int) -> None:
        """``_pull``, and tell the sender if it waits for room: its owner, and its helper."""
        # Since bytes were last counted as read there was a fence, so a word that is 0 now is seen
        # by a sender that looks for room once more.
        if self._pull(peer) and self._rings_in[peer].starved:
            sender = self._area.ranks[peer]
            self._area.board.ring((sender,))
            self._area.board.call_helpers(sender)

    def _push(self, peer: int) -> bool:
        """Move bytes of the first outgoing message to ``peer`` into the ring."""
        queue, ring = self._outgoing[peer], self._rings_out[peer]
        moved = False
        while queue:
            item = queue[0]
            room = ring.capacity - ring.num_filled()
            if not item.has_header:
                if room < HEADER_NBYTES:
                    break
                ring.write_header(item)
                item.has_header = moved = True
                room -= HEADER_NBYTES
            count = ring.write(item, room)
            moved |= count > 0
            if item.num_left:
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
                if filled < HEADER_NBYTES:
                    return moved
                item = self._arriving[peer] = self._open(peer, ring)
                moved = True
                continue
            count = ring.read(item, filled)
            moved |= count > 0
            if item.num_left:
                if not count:
                    return moved
                continue
            item.complete = True
            del self._arriving[peer]

    def _open(self, peer: int, ring: Ring) -> RingMessage:
        """Read a header and find or make the place for its bytes."""
        tag, nbytes, dtype, position = ring.read_header()
        asked = next((item for item in self._asked[peer] if item.tag == tag), None)
        if asked is not None:
            self._asked[peer].remove(asked)
            if asked.nbytes == nbytes and asked.dtype == dtype:
                return asked
            asked.error = self._differs(asked, peer, position, dtype, nbytes)
            asked.complete = True
        early = RingMessage.unasked(peer, tag, dtype, nbytes)
        if asked is None:
            self._early[peer].append(early)
        return early

    def _match(self, early: RingMessage, item: RingMessage) -> None:
        """Give a receive the message that came before it was asked for."""
        self._early[early.peer].remove(early)
        if early.nbytes != item.nbytes or early.dtype != item.dtype:
            item.error = self._differs(item, early.peer, -1, early.dtype, early.nbytes)
            item.complete = True
            return
        item.take_over(early)
        if early.complete:
            item.complete = True
        else:  # the rest of it goes straight to the receiver's tensor
            self._arriving[early.peer] = item

    def _differs(
        self, item: RingMessage, peer: int, position: int, dtype: torch.dtype, nbytes: int
    ) -> CollectiveMismatch:
        assert item.call is not None
        name = str(dtype).removeprefix("torch.")
        number = f" (#{position})" if position >= 0 else ""
        sent = f"send {name}[{nbytes // dtype.itemsize}] with tag {item.tag}{number}"
        calls = {self._area.rank: f"{item.call.signature} at {item.call.place}", peer: sent}
        return CollectiveMismatch.of_message(self._area.name, calls)
