"""The shared memory of one group: rounds, signatures, and room for small data.

All collectives are made of *rounds*. In round k a rank writes what it has to say into half ``k %
2`` of its slot (or staging), posts k, and waits until all ranks have posted k; then it may read the
others' half ``k % 2``. Whoever has posted k + 1 has read all of round k, so the half is free again
in round k + 2 without another wait::

    rank 0   write A | post 1 | read A's | write B | post 2 | read B's | write A …
    rank 1     write A | post 1 | read A's | write B | post 2 | …
                                                             └ all have posted 2, so all have read A

Layout of the segment, with a page and two slot halves a rank, then a ring for each pair of ranks::

    | page 0 | page 1 | … | slot 0 half 0 | slot 0 half 1 | slot 1 half 0 | … | ring 0→0 | ring 0→1
    | …
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.shm.futex import fence
from echelon.comm.shm.rank_table import RankTable
from echelon.comm.shm.segment import Segment
from echelon.diagnosis.collective_call import CollectiveCall, fingerprint
from echelon.errors import CollectiveMismatch, CommTimeout
from echelon.errors.message_text import text_bytes

SLOT_NBYTES = 1 << 16

_PAGE = 4096
_WORDS = _PAGE // 4
_LONGS = _PAGE // 8
_ROUND, _TEXT_LENGTH, _TEXT_ROUND = range(3)
# Notes on the last calls: (fingerprint, key, address). A rank is at most one call ahead of another.
_NOTES = 8
_NOTE_LONGS = 3
_NUM_NOTES = 4
_TEXT_START = 1024
_HALF = 1 << 31


# A ring's counters, on cache lines of their own before its bytes.
RING_CONTROL_NBYTES = 128


def ring_nbytes(size: int) -> int:
    """Capacity of the ring between two ranks, a power of two; smaller where there are many."""
    return 1 << 20 if size <= 4 else 1 << 18 if size <= 16 else 1 << 16


@final
class Area:
    """The segment of one group, seen from one rank.

    Attributes:
        halves: ``halves[rank][k % 2]``: a rank's slot in round k, bytes. 1D
        round: the last round that this rank posted.
    """

    def __init__(
        self, segment: Segment, board: RankTable, rank: int, ranks: Sequence[int], name: str
    ) -> None:
        self.segment, self.board, self.rank, self.ranks, self.name = (
            segment,
            board,
            rank,
            ranks,
            name,
        )
        self.size = len(ranks)
        self.peers = [r for r in range(self.size) if r != rank]
        self.round = 0
        self._peers_in_job = [ranks[r] for r in self.peers]
        self._bytes = memoryview(segment.buffer)
        self._words = self._bytes.cast("I")
        self._longs = self._bytes.cast("Q")
        slots = self.size * _PAGE
        self.halves = [
            [segment.tensor(slots + (2 * r + half) * SLOT_NBYTES, SLOT_NBYTES) for half in (0, 1)]
            for r in range(self.size)
        ]
        self._parts: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of an area for ``size`` ranks; most are touched only when used."""
        rings = size * size * (RING_CONTROL_NBYTES + ring_nbytes(size))
        return size * (_PAGE + 2 * SLOT_NBYTES) + rings

    def ring_start(self, src: int, dst: int) -> int:
        """Where the ring from ``src`` to ``dst`` begins, in bytes."""
        stride = RING_CONTROL_NBYTES + ring_nbytes(self.size)
        return self.size * (_PAGE + 2 * SLOT_NBYTES) + (src * self.size + dst) * stride

    def parts(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The slots of all ranks in the coming round, as 1D tensors of ``numel`` elements."""
        key = ((self.round + 1) & 1, dtype, numel)
        parts = self._parts.get(key)
        if parts is None:
            if len(self._parts) > 256:
                self._parts.clear()
            nbytes = numel * dtype.itemsize
            with torch.inference_mode(False):  # they outlive the caller's mode
                parts = self._parts[key] = [
                    halves[key[0]].narrow(0, 0, nbytes).view(dtype) for halves in self.halves
                ]
        return parts

    def next_round(self, call: CollectiveCall, timeout: float) -> None:
        """Post the next round and wait until all ranks have posted it."""
        words = self._words
        target = self.round = (self.round + 1) & 0xFFFFFFFF
        fence()  # what was written before must be seen before the post
        words[self.rank * _WORDS + _ROUND] = target
        self.board.ring(self._peers_in_job)
        for peer in self.peers:
            at = peer * _WORDS + _ROUND
            if (words[at] - target) & 0xFFFFFFFF >= _HALF:
                self._await_peer(at, target, call, timeout)
        fence()

    def absent(self) -> list[int]:
        """The ranks in the job that have not posted this rank's last round."""
        return [
            self.ranks[peer]
            for peer in self.peers
            if (self._words[peer * _WORDS + _ROUND] - self.round) & 0xFFFFFFFF >= _HALF
        ]

    def _await_peer(self, at: int, target: int, call: CollectiveCall, timeout: float) -> None:
        words = self._words

        def ready() -> bool:
            return (words[at] - target) & 0xFFFFFFFF < _HALF

        try:
            # A background thread must not hold the interpreter while the owner computes.
            self.board.wait(ready, lambda: str(call), self.absent, timeout, spin=call.blocking)
        except CommTimeout as error:
            raise self.board.monitor.explained(error) from None

    def agree(self, call: CollectiveCall, timeout: float, key: int = 0, address: int = 0) -> None:
        """First round of every call: check that all ranks make the same one.

        Args:
            key: in which window this rank's tensor lies and where, in 64 bits; 0: in none.
            address: of this rank's tensor in its own process; not needed for every call.

        Raises:
            CollectiveMismatch: the calls differ; raised on every rank, with the call of each.
        """
        longs, at = self._longs, self._note(call)
        mine = fingerprint(call.signature)
        own = self.rank * _LONGS + at
        longs[own], longs[own + 1], longs[own + 2] = mine, key, address
        self.next_round(call, timeout)
        for peer in self.peers:
            if longs[peer * _LONGS + at] != mine:
                self._mismatch(call, timeout)

    def keys(self, call: CollectiveCall) -> list[int]:
        """The keys of all ranks for the call that they have just agreed on."""
        at = self._note(call) + 1
        return [self._longs[rank * _LONGS + at] for rank in range(self.size)]

    def addresses(self, call: CollectiveCall) -> list[int]:
        """The addresses of all ranks for the call that they have just agreed on."""
        at = self._note(call) + 2
        return [self._longs[rank * _LONGS + at] for rank in range(self.size)]

    @staticmethod
    def _note(call: CollectiveCall) -> int:
        return _NOTES + (call.position % _NUM_NOTES) * _NOTE_LONGS

    def pid(self, rank: int) -> int:
        """The process of ``rank``."""
        return self.board.pid(self.ranks[rank])

    def _mismatch(self, call: CollectiveCall, timeout: float) -> None:
        calls = self.exchange_texts(call, f"{call.signature} at {call.place}", timeout)
        raise CollectiveMismatch(self.name, call.position, calls)

    def exchange_texts(self, call: CollectiveCall, text: str, timeout: float) -> dict[int, str]:
        """What every rank says, by rank; for errors that all ranks raise."""
        mine = text_bytes(text)[: _PAGE - _TEXT_START]
        start = self.rank * _PAGE + _TEXT_START
        self._bytes[start : start + len(mine)] = mine
        self._words[self.rank * _WORDS + _TEXT_LENGTH] = len(mine)
        self.next_round(call, timeout)
        calls = {}
        for rank in range(self.size):
            start = rank * _PAGE + _TEXT_START
            length = self._words[rank * _WORDS + _TEXT_LENGTH]
            calls[rank] = bytes(self._bytes[start : start + length]).decode(errors="replace")
        return calls
