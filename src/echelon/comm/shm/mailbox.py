"""Point-to-point messages, which travel through one message ring for each pair of ranks.

The receiver matches a message with the posted receive of the same tag, or keeps its bytes until
the receive is posted. ``progress`` moves all messages as far as it can without waiting; threads
that wait call it.

[Note: who moves long messages]
A message that fits into the ring stays there until the receiver looks for it. A sender that runs
out of room marks the ring as starved and wakes the receiver's helper thread; a receiver that reads
from a starved ring wakes the sender's helper thread. So long messages proceed while both owners
compute, and short ones wake only the thread that waits for them::

    sender    fill | starved = 1, call | … helper: fill | starved = 1, call | … helper: fill, 0
    receiver              helper: read, call | …               helper: read, call | …
"""

from __future__ import annotations

import threading
from collections import deque
from typing import final

from torch import Tensor

from echelon.comm.shm.area import Area
from echelon.comm.shm.message_ring import Header, RingMessage, RingReader, RingWriter
from echelon.comm.work import Work
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CollectiveMismatch, CommTimeout, StateError
from echelon.process import time_limits
from echelon.process.background_threads import run_in_background

# The helper thread wakes up this often even if nobody wakes it; nothing depends on it.
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

    def _is_over(self) -> bool:
        return self._item.complete

    def _wait(self, timeout: float | None) -> None:
        self._mailbox.wait(self._item, timeout)


@final
class Mailbox:
    """All messages between this rank and the others of its group."""

    def __init__(self, area: Area) -> None:
        self._area = area
        self._lock = threading.Lock()
        self._outgoing: dict[int, deque[RingMessage]] = {peer: deque() for peer in area.peers}
        self._posted: dict[int, list[RingMessage]] = {peer: [] for peer in area.peers}  # receives
        self._early: dict[int, list[RingMessage]] = {peer: [] for peer in area.peers}
        self._arriving: dict[int, RingMessage] = {}
        self._writers = {peer: RingWriter(area, area.rank, peer) for peer in area.peers}
        self._readers = {peer: RingReader(area, peer, area.rank) for peer in area.peers}
        self._thread: threading.Thread | None = None
        self._closing = False

    def send(self, call: CollectiveCall, tensor: Tensor, dst: int, tag: int) -> Work:
        """Start to send; the work is complete when the last byte is in the ring."""
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
            early = _take_first(self._early[src], tag)
            if early is None:
                self._posted[src].append(item)
            else:
                self._match(early, item)
            if not item.complete:
                self._drain(src)
        return self._started(item)

    def probe(self, tag: int) -> int | None:
        """A rank that has sent a message with this tag whose receive is not posted yet."""
        self.progress()
        with self._lock:
            for peer, items in self._early.items():
                if any(item.tag == tag for item in items):
                    return peer
        return None

    def wait(self, item: RingMessage, timeout: float | None) -> None:
        """Move messages until ``item`` is complete."""
        if not item.complete:
            self._progress_until(item, timeout)
        if item.error is not None:
            raise item.error

    def _progress_until(self, item: RingMessage, timeout: float | None) -> None:
        area = self._area

        def ready() -> bool:
            self.progress()
            return item.complete

        def missing() -> list[int]:
            return [area.ranks[item.peer]]

        seconds = area.timeout if timeout is None else timeout
        try:
            area.table.wait(ready, lambda: str(item.call), missing, seconds)
        except CommTimeout as error:
            # A caller with a timeout of its own may wait again, so only the default one explains.
            raise area.table.monitor.explained(error) if timeout is None else error from None

    def progress(self) -> None:
        """Move all messages as far as possible without waiting."""
        with self._lock:
            for peer in self._area.peers:
                self._feed(peer)
                self._drain(peer)

    def close(self) -> None:
        """Send all messages that are still outgoing, then end the helper thread."""
        area = self._area

        def unsent() -> list[int]:
            return [area.ranks[peer] for peer, items in self._outgoing.items() if items]

        def ready() -> bool:
            self.progress()
            return not unsent()

        if unsent():
            area.table.wait(
                ready, lambda: "the end of the world, with messages unsent,", unsent, area.timeout
            )
        self.abandon()

    def abandon(self) -> None:
        """End the helper thread and drop outgoing messages."""
        self._ask_to_end()
        if self._thread is not None:
            self._thread.join(time_limits.END_THREADS_S)

    def _ask_to_end(self) -> None:
        self._closing = True
        if self._thread is not None:
            self._area.table.wake_helper(self._area.ranks[self._area.rank])

    def _check_open(self, call: CollectiveCall) -> None:
        if self._closing:
            raise StateError(f"{call} cannot run, because this rank has closed the world")

    def _started(self, item: RingMessage) -> Work:
        assert item.call is not None
        if not (item.complete or item.call.blocking or self._thread):
            name = f"messages of {self._area.name}"
            self._thread = run_in_background(name, self._loop, stop=self._ask_to_end)
        return _MailWork(item.call, self, item)

    def _loop(self) -> None:
        """Keep long messages moving while the owner computes."""
        while not self._closing:
            self._area.table.help(self.progress, _LOOK_S)

    def _feed(self, peer: int) -> None:
        """Write outgoing messages; wake the receiver's helper if there is no room for all."""
        queue, ring = self._outgoing[peer], self._writers[peer]
        if not queue:
            return
        moved = changed = self._push(queue, ring)
        if queue and not ring.is_starved:
            ring.is_starved = changed = True
            # The receiver may have made room before it could see the mark.
            moved |= self._push(queue, ring)
        table, receiver = self._area.table, self._area.ranks[peer]
        if not queue and ring.is_starved:
            ring.is_starved = False
        if moved:
            table.wake((receiver,))
        if queue and changed:
            table.wake_helper(receiver)

    def _drain(self, peer: int) -> None:
        """Read arriving messages; wake the sender and its helper if they wait for room."""
        # ``_pull`` ends with a fence. If the mark is not seen after it, the sender sees the room
        # when it looks once more.
        if self._pull(peer) and self._readers[peer].is_starved:
            sender = self._area.ranks[peer]
            self._area.table.wake((sender,))
            self._area.table.wake_helper(sender)

    @staticmethod
    def _push(queue: deque[RingMessage], ring: RingWriter) -> bool:
        """Write messages in order until the ring is full; return whether any bytes moved."""
        moved = False
        while queue and ring.write(queue[0]):
            moved = True
            if queue[0].num_moved == queue[0].nbytes:
                queue.popleft().complete = True
        return moved

    def _pull(self, peer: int) -> bool:
        """Read messages until the ring is empty; return whether any bytes moved."""
        ring = self._readers[peer]
        moved = False
        while True:
            item = self._arriving.get(peer)
            if item is None:
                header = ring.read_header()
                if header is None:
                    return moved
                item = self._arriving[peer] = self._matching(peer, header)
            if not ring.read(item):
                return moved
            moved = True
            if item.num_moved == item.nbytes:
                item.complete = True
                del self._arriving[peer]

    def _matching(self, peer: int, header: Header) -> RingMessage:
        """The posted receive of an arriving message, or memory that keeps its bytes."""
        posted = _take_first(self._posted[peer], header.tag)
        if posted is not None and self._fits(posted, header):
            return posted
        early = RingMessage.unexpected(peer, header)
        if posted is None:
            self._early[peer].append(early)
        return early  # a message that does not fit its receive is read and dropped

    def _match(self, early: RingMessage, item: RingMessage) -> None:
        """Give a new receive the message that arrived before it."""
        if not self._fits(item, Header(early.tag, early.nbytes, early.dtype, position=None)):
            return
        item.take_over(early)
        if early.complete:
            item.complete = True
        else:  # its remaining bytes go straight to the receiver's tensor
            self._arriving[early.peer] = item

    def _fits(self, item: RingMessage, header: Header) -> bool:
        """Whether a receive expects the message of ``header``; if not, the receive fails."""
        if item.nbytes == header.nbytes and item.dtype == header.dtype:
            return True
        assert item.call is not None
        name = str(header.dtype).removeprefix("torch.")
        number = "" if header.position is None else f" (#{header.position})"
        numel = header.nbytes // header.dtype.itemsize
        sent = f"send {name}[{numel}] with tag {item.tag}{number}"
        ranks, received = self._area.job_ranks, f"{item.call.signature} at {item.call.place}"
        calls = {ranks[self._area.rank]: received, ranks[item.peer]: sent}
        item.error = CollectiveMismatch.of_message(self._area.name, calls)
        item.complete = True
        return False


def _take_first(items: list[RingMessage], tag: int) -> RingMessage | None:
    """Remove the first message with this tag and return it."""
    for i, item in enumerate(items):
        if item.tag == tag:
            return items.pop(i)
    return None
