"""Messages between ranks over a c10d engine: tags only equal calls share, waits that name a peer.

[Note: tags] gloo matches a send with a receive of the same peers and tag, in order, and knows
neither length nor dtype: a wrong length aborts the process, a wrong dtype is garbage. So part of
the call is part of the tag, and two calls that differ never meet: both ranks time out, and their
notices then show the difference. A tag has 31 bits, and applications use small ones::

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
from typing import Any, Protocol, final

import torch
from torch import Tensor

from echelon.diagnosis.collective_call import CallSignature, fingerprint
from echelon.errors import ArgumentError, StateError
from echelon.process.forks import disown_in_forks, keep_alive

MAX_TAG = 1 << 16
_COLLECTIVE = 1 << 30
PHASE = 1 << 29
_MESSAGE = 1 << 29
_NEVER_SENT = _COLLECTIVE - 1  # inside the space of messages; no user tag reaches it
_BRIEFLY = timedelta(milliseconds=1)


class EngineWork(Protocol):
    """A work of c10d."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


class Engine(Protocol):
    """What this package calls of a c10d process group or of one of its backends."""

    def send(self, tensors: list[Tensor], dst: int, tag: int, /) -> EngineWork: ...
    def recv(self, tensors: list[Tensor], src: int, tag: int, /) -> EngineWork: ...
    def allreduce(self, tensors: list[Tensor], opts: Any, /) -> EngineWork: ...
    def broadcast(self, tensors: list[Tensor], opts: Any, /) -> EngineWork: ...
    def reduce(self, tensors: list[Tensor], opts: Any, /) -> EngineWork: ...
    def alltoall_base(
        self, output: Tensor, input: Tensor, outs: list[int], ins: list[int], opts: Any, /
    ) -> EngineWork: ...
    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any, /) -> EngineWork: ...
    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any, /) -> EngineWork: ...


class PeerLost(Exception):
    """Peers did not answer; the group turns it into an error with names.

    Attributes:
        missing: ranks in the group.
        late: whether time was up; else their connections closed.
    """

    def __init__(self, missing: tuple[int, ...], late: bool) -> None:
        super().__init__(missing, late)
        self.missing, self.late = missing, late


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
        kind = fingerprint(CallSignature("message", tensor.dtype, (tensor.numel(),)))
        return _MESSAGE | tag << 13 | (number & 0xF) << 9 | kind & 0x1FF


@final
class Peers:
    """The other ranks of a group, reached by messages.

    Args:
        engine: one with tagged messages between any two ranks (gloo).
        timeout: seconds that a rank waits for others in one collective.
        tell: called with the peer that is waited for, and with None when it has come.
    """

    def __init__(
        self,
        engine: Engine,
        rank: int,
        size: int,
        timeout: float,
        tell: Callable[[int | None], None] = lambda peer: None,
    ) -> None:
        self._engine: Engine | None = engine
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._tell = tell
        self.awaited: tuple[int, ...] = ()  # whom the collective that runs waits for
        disown_in_forks(self)

    def disown(self) -> None:
        """Leave the engine to the rank that has forked this process."""
        keep_alive(self._engine)

    def others(self) -> list[int]:
        """All other ranks, from the next one on, so that not all ranks begin with the same one."""
        return [(self.rank + i) % self.size for i in range(1, self.size)]

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
            is_message: whether it is a message of the user's, beside which a collective may run.

        Raises:
            PeerLost: names all those that are not.
        """
        pending = iter(posted)
        for work, peer in pending:
            if work is None:
                continue
            if not is_message:
                self.awaited = (peer,)
            self._tell(peer)
            left = max(deadline - time.monotonic(), 0.0)
            try:
                # The engine counts whole milliseconds: rounded down, it would give up too early.
                work.wait(timedelta(milliseconds=math.ceil(left * 1e3) + 1))
            except RuntimeError as error:
                late = time.monotonic() >= deadline
                raise PeerLost(_lost(pending, peer, late), late) from error
        if not is_message:
            self.awaited = ()
        self._tell(None)

    def sever(self) -> None:
        """Break all connections: a wait that is over at once makes gloo close them."""
        nothing = torch.zeros(1, dtype=torch.uint8)
        for peer in self.others():
            # A wait for a peer that is gone already fails as well, but closes nothing else.
            with suppress(RuntimeError):
                if self._engine is not None:
                    self._engine.recv([nothing], peer, _NEVER_SENT).wait(_BRIEFLY)

    def close(self) -> None:
        """Let go of the engine, which ends its threads."""
        self._engine = None


Posted = tuple[EngineWork | None, int]  # a work, None for no bytes, and the peer


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
