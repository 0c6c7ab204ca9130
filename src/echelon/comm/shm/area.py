"""The shared memory of one group: rounds, signatures of calls, and slots for small data.

All collectives consist of *rounds*. In round k a rank writes to half ``k % 2`` of its slot (or of
its staging memory), posts k, and waits until all ranks have posted k; then it may read half
``k % 2`` of the other ranks. A rank that has posted k + 1 has read everything of round k, so the
half can be reused in round k + 2 without another wait::

    rank 0   write A | post 1 | read A's | write B | post 2 | read B's | write A …
    rank 1     write A | post 1 | read A's | write B | post 2 | …
                                                             └ all have posted 2, so all have read A

The segment holds a page and two slot halves for each rank, then a message ring for each pair of
ranks::

    | page 0 | page 1 | … | slot 0 half 0 | slot 0 half 1 | slot 1 half 0 | … | ring 0→0 | ring 0→1
    | …
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from echelon.comm.buffers import from_bytes
from echelon.comm.shm.futex import fence
from echelon.comm.shm.rank_table import RankTable
from echelon.comm.shm.segment import Segment
from echelon.diagnosis.collective_call import CollectiveCall, fingerprint
from echelon.errors import CollectiveMismatch, CommTimeout, SharedMemoryError
from echelon.errors.message_text import text_bytes
from echelon.ranges import even_chunks

SLOT_NBYTES = 1 << 16

_PAGE = 4096
_WORDS = _PAGE // 4
_LONGS = _PAGE // 8
_ROUND, _TEXT_LENGTH = range(2)
# Each page has notes on the last calls: fingerprint, window key and address. No rank is more than
# one call ahead of another.
_NOTES = 8
_NOTE_LONGS = 3
_NUM_NOTES = 4
_TEXT_START = 1024
_HALF = 1 << 31
_CACHE_LINE_NBYTES = 64

# The counters of a ring lie before its bytes, on cache lines of their own.
RING_CONTROL_NBYTES = 2 * _CACHE_LINE_NBYTES

_TOKEN_NBYTES = 64
_REFUSED = "!"  # in place of a token, before the facts of a SharedMemoryError


def ring_nbytes(size: int) -> int:
    """The capacity of a ring, a power of two; rings of large groups are smaller."""
    return 1 << 20 if size <= 4 else 1 << 18 if size <= 16 else 1 << 16


@final
@dataclass(frozen=True)
class ExchangedParts:
    """The parts that ranks send to each other in an exchange.

    Attributes:
        longest: the number of elements of the longest part.
        addresses: ``addresses[src][dst]`` is valid in the process of ``src``.
    """

    longest: int
    addresses: Sequence[Sequence[int]]


@final
class Area:
    """The segment of one group, seen from one rank.

    Attributes:
        segment: the memory, of ``Area.nbytes(size)``.
        table: the ranks of the job.
        rank: this rank in the group; ``ranks`` are those of all members in the table, and
            ``job_ranks`` in the job.
        timeout: the seconds to wait in one round.
        round: the last round that this rank has posted.
    """

    def __init__(
        self,
        segment: Segment,
        table: RankTable,
        rank: int,
        ranks: Sequence[int],
        name: str,
        timeout: float,
    ) -> None:
        self.segment, self.table, self.name, self.timeout = segment, table, name, timeout
        self.rank, self.ranks = rank, ranks
        self.job_ranks = [table.job_ranks[r] for r in ranks]
        self.size = len(ranks)
        self.peers = [r for r in range(self.size) if r != rank]
        self.round = 0
        self._peers_in_table = [ranks[r] for r in self.peers]
        self.bytes = memoryview(segment.buffer)
        self.words = self.bytes.cast("I")
        self._longs = self.bytes.cast("Q")
        slots = self.size * _PAGE
        self._halves = [
            [segment.tensor(slots + (2 * r + half) * SLOT_NBYTES, SLOT_NBYTES) for half in (0, 1)]
            for r in range(self.size)
        ]
        self._slots: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    @staticmethod
    def nbytes(size: int) -> int:
        """The length of the segment for ``size`` ranks; pages are taken when they are used."""
        rings = size * size * (RING_CONTROL_NBYTES + ring_nbytes(size))
        return size * (_PAGE + 2 * SLOT_NBYTES) + rings

    def ring_start(self, src: int, dst: int) -> int:
        """The offset of the ring from ``src`` to ``dst``, in bytes."""
        stride = RING_CONTROL_NBYTES + ring_nbytes(self.size)
        return self.size * (_PAGE + 2 * SLOT_NBYTES) + (src * self.size + dst) * stride

    def slots(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The slots of all ranks in the next round, as 1D tensors of ``numel`` elements."""
        key = ((self.round + 1) & 1, dtype, numel)
        slots = self._slots.get(key)
        if slots is None:
            if len(self._slots) > 256:
                self._slots.clear()
            nbytes = numel * dtype.itemsize
            with torch.inference_mode(False):  # the cache outlives the caller's mode
                slots = self._slots[key] = [
                    halves[key[0]].narrow(0, 0, nbytes).view(dtype) for halves in self._halves
                ]
        return slots

    def chunks(self, numel: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        """One range of elements for each rank, so that no two ranks write to one cache line."""
        return even_chunks(numel, self.size, max(1, _CACHE_LINE_NBYTES // dtype.itemsize))

    def next_round(self, call: CollectiveCall) -> None:
        """Post the next round and wait until all ranks have posted it."""
        words = self.words
        target = self.round = (self.round + 1) & 0xFFFFFFFF
        fence()  # peers must see the data of the round before its number
        words[self.rank * _WORDS + _ROUND] = target
        self.table.wake(self._peers_in_table)
        for peer in self.peers:
            at = peer * _WORDS + _ROUND
            if (words[at] - target) & 0xFFFFFFFF >= _HALF:
                self._await_peer(at, target, call)
        fence()

    def absent(self) -> list[int]:
        """The ranks (in the table) that have not posted the last round of this rank."""
        return [
            self.ranks[peer]
            for peer in self.peers
            if (self.words[peer * _WORDS + _ROUND] - self.round) & 0xFFFFFFFF >= _HALF
        ]

    def _await_peer(self, at: int, target: int, call: CollectiveCall) -> None:
        words = self.words

        def ready() -> bool:
            return (words[at] - target) & 0xFFFFFFFF < _HALF

        try:
            # A background thread that spins would hold the GIL while the owner computes.
            self.table.wait(ready, lambda: str(call), self.absent, self.timeout, spin=call.blocking)
        except CommTimeout as error:
            raise self.table.monitor.explained(error) from None

    def agree(self, call: CollectiveCall, key: int = 0, address: int = 0) -> None:
        """Run the first round of a call, which checks that all ranks issued the same one.

        ``key`` says where in which window this rank's tensor lies (0: in none), and ``address`` is
        that of the tensor in its process; peers read them by ``keys`` and ``addresses``.
        """
        longs, at = self._longs, _NOTES + (call.position % _NUM_NOTES) * _NOTE_LONGS
        digest = fingerprint(call.signature)
        note = self.rank * _LONGS + at
        longs[note], longs[note + 1], longs[note + 2] = digest, key, address
        self.next_round(call)
        for peer in self.peers:
            if longs[peer * _LONGS + at] != digest:
                calls = self.exchange_texts(call, f"{call.signature} at {call.place}")
                raise CollectiveMismatch(self.name, call.position, calls)

    def keys(self, call: CollectiveCall) -> list[int]:
        """The window keys of all ranks for the call that they have just agreed on."""
        return self._of_notes(call, 1)

    def addresses(self, call: CollectiveCall) -> list[int]:
        """The addresses of all ranks for the call that they have just agreed on."""
        return self._of_notes(call, 2)

    def _of_notes(self, call: CollectiveCall, i: int) -> list[int]:
        at = _NOTES + (call.position % _NUM_NOTES) * _NOTE_LONGS + i
        return [self._longs[rank * _LONGS + at] for rank in range(self.size)]

    def pid(self, rank: int) -> int:
        """The process of ``rank``."""
        return self.table.pid(self.ranks[rank])

    def exchange_texts(self, call: CollectiveCall, text: str) -> dict[int, str]:
        """The text of every rank, by rank in the job, for an error of all. Takes one round."""
        data = text_bytes(text)[: _PAGE - _TEXT_START]
        start = self.rank * _PAGE + _TEXT_START
        self.bytes[start : start + len(data)] = data
        self.words[self.rank * _WORDS + _TEXT_LENGTH] = len(data)
        self.next_round(call)
        texts = {}
        for rank in range(self.size):
            start = rank * _PAGE + _TEXT_START
            length = self.words[rank * _WORDS + _TEXT_LENGTH]
            texts[self.job_ranks[rank]] = bytes(self.bytes[start : start + length]).decode(
                errors="replace"
            )
        return texts

    def share_segments(
        self, call: CollectiveCall, nbytes: int, *, what: str, reserve: bool = True
    ) -> dict[int, Segment]:
        """Make a segment on each rank with ``nbytes`` > 0, and map all of them on every rank.

        Takes two rounds. If one rank lacks memory, all raise its ``SharedMemoryError``, so that
        they stay in step. Unless ``reserve``, memory is taken only when it is written.
        """
        local, token = None, ""
        try:
            if nbytes:
                local = Segment.create(nbytes, what=what, reserve=reserve)
                token = local.token
        except SharedMemoryError as error:
            token = f"{_REFUSED}{error.needed}:{error.available}:{error.file_limit:d}"
        slots = self.slots(torch.uint8, _TOKEN_NBYTES)
        slots[self.rank].copy_(from_bytes(token.encode().ljust(_TOKEN_NBYTES)))
        self.next_round(call)
        tokens = [bytes(slot.numpy()).decode().strip() for slot in slots]
        refused = {r: token for r, token in enumerate(tokens) if token.startswith(_REFUSED)}
        segments = {
            rank: local if local and rank == self.rank else Segment.open(token, populate=reserve)
            for rank, token in enumerate(tokens)
            if token and not refused
        }
        self.next_round(call)  # all ranks have mapped it
        if local is not None:
            local.unpublish()
        for rank, token in refused.items():
            needed, available, file_limit = map(int, token.removeprefix(_REFUSED).split(":"))
            where = f"{what} (on rank {self.job_ranks[rank]})"
            raise SharedMemoryError(where, needed, available, file_limit=bool(file_limit))
        return segments
