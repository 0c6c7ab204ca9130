"""Tagged messages between ranks over a c10d engine, whose waits name the peer that is missing.

[Note: tags] gloo matches a send with a receive of the same peers and tag, in order, and knows
neither length nor dtype: a wrong length aborts the process, a wrong dtype is garbage. So a hash of
the call is part of the tag, and two calls that differ never match: both ranks time out, and their
failure records then show the difference. A tag has 31 bits, and applications use small ones::

    collective  [1 | phase 1 | position 12 | fingerprint of the call 17]
    message     [0 1 | tag of the user 16  | number within tag 4 | numel and dtype 9]

Numbers that wrap round do no harm, because messages of one tag are matched in order.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import final

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from echelon.comm.torch_dist.engines import Engine, EngineWork
from echelon.comm.torch_dist.stores import await_keys
from echelon.diagnosis.collective_call import CallSignature, fingerprint, signature_of
from echelon.errors import ArgumentError, StateError
from echelon.process.forks import disown_in_forks, keep_alive

MAX_TAG = 1 << 16
_COLLECTIVE = 1 << 30
PHASE = 1 << 29
_MESSAGE = 1 << 29
_NEVER_SENT = _COLLECTIVE - 1  # inside the space of messages; no user tag reaches it
_BRIEFLY = timedelta(milliseconds=1)


class PeerLost(Exception):
    """Peers did not answer; the group turns it into an error with names.

    Attributes:
        missing: ranks in the group.
        late: whether time was up; else their connections closed.
    """

    def __init__(self, missing: tuple[int, ...], late: bool) -> None:
        super().__init__(missing, late)
        self.missing, self.late = missing, late


def await_peers(
    store: c10d.Store,
    rank: int,
    size: int,
    timeout: float,
    *,
    check: Callable[[], None],
    on_wait: Callable[[int | None], None],
) -> None:
    """Return when all ranks of a new group have called this, before any of them makes an engine.

    An engine would wait in C++ for each rank until time is up, even for one that has died. Here
    that is noticed at once, and only the ranks that are missing are named.

    Args:
        store: of this group alone.
        check: raises if a rank will never come.
        on_wait: called with the rank that is waited for, and with None when all are here.

    Raises:
        PeerLost: names the ranks that are missing.
    """

    deadline = time.monotonic() + timeout

    def look(missing: tuple[int, ...]) -> None:
        on_wait(missing[0])
        # Once its own time is up, this rank reports what it saw, not what others report of it.
        if time.monotonic() <= deadline:
            check()

    keys = [f"here/{peer}" for peer in range(size)]
    store.set(keys[rank], "")
    await_keys(
        store,
        keys,
        deadline,
        check=look,
        time_out=lambda missing: PeerLost(missing, late=True),
    )
    on_wait(None)


def collective_tag(call: CallSignature, position: int) -> int:
    """The tag of a collective, see [Note: tags]."""
    return _COLLECTIVE | (position & 0xFFF) << 17 | fingerprint(call) & 0x1FFFF


def sized_tag(tag: int, numel: int) -> int:
    """The tag of one message of a collective in which each pair of ranks has its own length."""
    return tag ^ (numel * 0x9E3779B1 >> 8 & 0x1FFFF)


@final
class Mailroom:
    """The tags of the messages that users send and receive, see [Note: tags]."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int, int], int] = defaultdict(int)

    def tag(self, op: str, tensor: Tensor, peer: int, tag: int) -> int:
        """The engine's tag of the next message of this kind."""
        if not 0 <= tag < MAX_TAG:
            raise ArgumentError(f"{op}: tag {tag} must be in 0 ... {MAX_TAG - 1} on this group")
        number = self._numbers[op, peer, tag]
        self._numbers[op, peer, tag] = number + 1
        kind = fingerprint(signature_of("message", tensor.dtype, (tensor.numel(),)))
        return _MESSAGE | tag << 13 | (number & 0xF) << 9 | kind & 0x1FF


@final
class Peers:
    """The other ranks of a group, reached by messages.

    Args:
        engine: one with tagged messages between any two ranks (gloo).
        timeout: seconds that a rank waits for others in one collective.
        on_wait: called with the peer that is waited for, and with None when the wait is over.

    Attributes:
        others: all other ranks from the next one on, so that ranks begin with different peers.
        awaited: whom the collective that runs waits for.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        size: int,
        timeout: float,
        on_wait: Callable[[int | None], None] = lambda peer: None,
    ) -> None:
        self._engine: Engine | None = engine
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.others = [(rank + i) % size for i in range(1, size)]
        self._on_wait = on_wait
        self.awaited: tuple[int, ...] = ()
        disown_in_forks(self)

    def disown(self) -> None:
        """Leave the engine to the rank that has forked this process."""
        keep_alive(self._engine)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Posted:
        """Begin to send; the tensor must not change before the wait."""
        return self._post("send", tensor, peer, tag)

    def recv(self, tensor: Tensor, peer: int, tag: int) -> Posted:
        """Begin to receive into ``tensor``."""
        return self._post("recv", tensor, peer, tag)

    def _post(self, op: str, tensor: Tensor, peer: int, tag: int) -> Posted:
        if tensor.numel() == 0:
            return None, peer
        engine = self._engine
        if engine is None:
            raise StateError(f"{op}: the world of this group was closed")
        post = engine.send if op == "send" else engine.recv
        try:
            return post([tensor], peer, tag), peer
        except RuntimeError as error:
            raise PeerLost((peer,), late=False) from error

    def deadline(self) -> float:
        """When a collective that begins now has waited too long, on the monotonic clock."""
        return time.monotonic() + self.timeout

    def wait(self, posted: Iterable[Posted], deadline: float, *, is_message: bool = False) -> None:
        """Return when all are complete.

        Args:
            is_message: whether this is a message of the user's, beside which a collective may run.

        Raises:
            PeerLost: names all those that are not.
        """
        pending, last = iter(posted), None
        for work, peer in pending:
            if work is None:
                continue
            if peer != last:
                if not is_message:
                    self.awaited = (peer,)
                self._on_wait(peer)
                last = peer
            left = max(deadline - time.monotonic(), 0.0)
            try:
                # The engine counts whole milliseconds: rounded down, it would give up too early.
                work.wait(timedelta(milliseconds=math.ceil(left * 1e3) + 1))
            except RuntimeError as error:
                late = time.monotonic() >= deadline
                raise PeerLost(_lost(pending, peer, late), late) from error
        if not is_message:
            self.awaited = ()
        self._on_wait(None)

    def stop_waiting(self) -> None:
        """Record that no peer is waited for any more, after a wait that has failed."""
        self.awaited = ()
        self._on_wait(None)

    def sever(self) -> None:
        """Break all connections: gloo closes them when a wait times out, so one is made to."""
        buffer = torch.zeros(1, dtype=torch.uint8, device="cpu")
        for peer in self.others:
            # A wait for a peer that has ended fails too, but then gloo closes nothing else.
            with suppress(RuntimeError):
                if self._engine is not None:
                    self._engine.recv([buffer], peer, _NEVER_SENT).wait(_BRIEFLY)

    def close(self) -> None:
        """Drop the reference to the engine, which ends its threads."""
        self._engine = None


# A work and its peer. The work is None where there are no bytes to send.
Posted = tuple[EngineWork | None, int]


def _lost(pending: Iterable[Posted], first: int, late: bool) -> tuple[int, ...]:
    """``first`` and the peers of those of ``pending`` that failed in the same way."""
    lost = {first: None}
    for work, peer in pending:
        if work is None or peer in lost:
            continue
        try:
            work.wait(_BRIEFLY)
        except RuntimeError as error:
            # gloo closes all connections once one wait has timed out; those are not lost.
            only_late = "imed out" in str(error) or "pplication timeout" in str(error)
            if late or not only_late:
                lost[peer] = None
    return tuple(lost)
