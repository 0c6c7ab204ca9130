"""The table of the ranks of a job: their states and failures, sleeping and waking, and time-outs.

The table is one segment with a page for each rank. Each word has one writer, so no atomic
operations are needed::

    rank r:  | state | pid | text length | rank at fault | bell | sleepers | bell | sleepers |
             | note length | … note … | … text … |

The note holds the facts that the ranks compare at the start, and the text says how the rank failed.
A rank that died without a text is noticed by the pidfd of its process.

A bell is a futex word that every rank may write, always with a value that was never written before.
A thread reads the bell, checks its condition, and sleeps until the bell changes, so it cannot miss
a change. One bell of a rank is for the conditions of its owner, and the other for its *helper
threads*, which move data while the owner computes, and which small changes need not wake.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import final

from echelon.comm.shm.futex import Bell, fence
from echelon.comm.shm.segment import Segment
from echelon.diagnosis.flight_recorder import Phase
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import CommTimeout, RankFailed
from echelon.errors.message_text import text_bytes
from echelon.process.operating_system import num_processors

_PAGE = 4096
_WORDS = _PAGE // 4
_STATE, _PID, _TEXT_LENGTH, _AT_FAULT = range(4)
# Both are bells; the word after a bell counts the threads that sleep on it.
_OWNER, _HELPERS = 4, 6
_NOTE_LENGTH = 8
_NOTE_START, _TEXT_START = 64, 1024  # in bytes
_ABSENT, _HERE, _LEFT, _FAILED = range(4)

# A sleeping rank checks this often whether peers have died, because the dead ring no bell.
_LOOK_S = 0.05
# Spinning saves two context switches if a peer is about to come. It pays while each rank has a
# core.
_SPIN_S = 0.0001


@final
class RankTable:
    """The table of all ranks of a job, as one of them sees it.

    Attributes:
        segment: the memory, of ``RankTable.nbytes(size)``.
        monitor: the records about this rank and the others, for reports.
        job_ranks: the ranks in the job, by their rank in this table; None: the same numbers.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        size: int,
        monitor: RankMonitor,
        job_ranks: Sequence[int] | None = None,
    ) -> None:
        self.segment, self.rank, self.size, self.monitor = segment, rank, size, monitor
        self._is_of_job = job_ranks is None
        self.job_ranks = range(size) if job_ranks is None else tuple(job_ranks)
        self._has_left = False
        self._left: str | None = None  # why this rank has left
        self._bytes = memoryview(segment.buffer)
        self._words = self._bytes.cast("I")
        base = ctypes.addressof(ctypes.c_char.from_buffer(segment.buffer))
        self._bells = {
            kind: [Bell(base + r * _PAGE + kind * 4) for r in range(size)]
            for kind in (_OWNER, _HELPERS)
        }
        self._wakes = itertools.count(1)  # unlike an integer, safe to advance from many threads
        self._pidfds: dict[int, int] = {}
        self._num_sleepers = {_OWNER: 0, _HELPERS: 0}
        self._sleep_lock = threading.Lock()
        self.spin_s = _SPIN_S if size <= num_processors() else _SPIN_S / 20

    @staticmethod
    def nbytes(size: int) -> int:
        """The length of the segment for ``size`` ranks."""
        return size * _PAGE

    # Joining and leaving ---------------------------------------------------------------------

    def join(self, note: bytes, timeout: float) -> None:
        """Enter this rank with its note, and return when all ranks have entered."""
        assert len(note) <= _TEXT_START - _NOTE_START, "facts of a start are short"
        start = self.rank * _PAGE + _NOTE_START
        self._bytes[start : start + len(note)] = note
        self._words[self._at(self.rank, _NOTE_LENGTH)] = len(note)
        self._words[self._at(self.rank, _PID)] = os.getpid()
        fence()
        self._words[self._at(self.rank, _STATE)] = _HERE
        everyone = [r for r in range(self.size) if r != self.rank]
        self.wake(everyone)
        deadline = time.monotonic() + timeout
        while missing := [r for r in everyone if self._state(r) == _ABSENT]:
            self._sleep(_OWNER, lambda: self._state(missing[0]) != _ABSENT, _LOOK_S)
            if time.monotonic() > deadline:
                late = f"rank {self.job_ranks[self.rank]}, starting a world of {self.size} ranks,"
                raise self.monitor.explained(CommTimeout(late, self.named(missing), timeout))
        for r in everyone:
            # A rank without a descriptor counts as dead.
            with suppress(ProcessLookupError):
                self._pidfds[r] = os.pidfd_open(self._words[self._at(r, _PID)])

    def notes(self) -> list[bytes]:
        """The note of each rank, in rank order."""
        notes = []
        for rank in range(self.size):
            start = rank * _PAGE + _NOTE_START
            length = self._words[self._at(rank, _NOTE_LENGTH)]
            notes.append(bytes(self._bytes[start : start + length]))
        return notes

    def leave(self, failure: str | None, at_fault: int | None = None) -> None:
        """Record that this rank has left, and wake all ranks.

        The errors of other ranks repeat ``failure``, and so do waits of this rank that are under
        way on other threads. ``at_fault`` is the rank in the job that it is about; by default it is
        this rank.
        """
        self._has_left, self._left = True, failure
        if failure is not None:
            text = text_bytes(failure)[: _PAGE - _TEXT_START]
            start = self.rank * _PAGE + _TEXT_START
            self._bytes[start : start + len(text)] = text
            self._words[self._at(self.rank, _TEXT_LENGTH)] = len(text)
            self._words[self._at(self.rank, _AT_FAULT)] = (
                self.job_ranks[self.rank] if at_fault is None else at_fault
            )
            fence()
        self._words[self._at(self.rank, _STATE)] = _LEFT if failure is None else _FAILED
        self.wake([r for r in range(self.size) if r != self.rank])
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds.clear()
        if self._is_of_job:
            self.monitor.set_phase(Phase.CLOSED)

    # Sleeping and waking ---------------------------------------------------------------------

    def wake_helper(self, rank: int) -> None:
        """Wake the helper thread of ``rank``, after data arrived that it should move."""
        self.wake((rank,), _HELPERS)

    def wake(self, ranks: Sequence[int], kind: int = _OWNER) -> None:
        """Wake the owners of ``ranks``, after something changed that they may wait for."""
        value = (next(self._wakes) * self.size + self.rank) & 0xFFFFFFFF  # was never written
        words = self._words
        for rank in ranks:
            words[rank * _WORDS + kind] = value
        fence()  # sleepers must see the change before this thread counts them
        for rank in ranks:
            if words[rank * _WORDS + kind + 1]:
                self._bells[kind][rank].wake()

    def wait(
        self,
        ready: Callable[[], bool],
        doing: Callable[[], str],
        missing: Callable[[], Sequence[int]],
        timeout: float,
        spin: bool = True,
    ) -> None:
        """Return when ``ready()``: spin for a moment, then sleep until a bell rings.

        ``missing`` returns the ranks (in the table) that this one waits for. If any rank fails, or
        a missing one leaves or dies, raise ``RankFailed``, which names the call ``doing``. Spinning
        holds the GIL.
        """
        now = time.perf_counter
        if spin:
            end = now() + self.spin_s
            while now() < end:
                if ready():
                    return
        deadline = now() + timeout
        is_recorded = False
        try:
            while not ready():
                self._sleep(_OWNER, ready, min(_LOOK_S, max(0.0, deadline - now())))
                failure = self._failure(doing, missing)
                # This check comes after that for failures: a rank may have done its part first.
                if ready():
                    return
                if failure is not None:
                    raise failure
                if now() >= deadline:
                    # Else this rank would look as if it computed.
                    late_in_job = self.named(missing())
                    self.monitor.give_up(late_in_job)
                    raise CommTimeout(doing(), late_in_job, timeout)
                # Recorded each time, because another thread of this rank may have ended a wait.
                if late := missing():
                    self.monitor.wait_for(self.job_ranks[late[0]])
                    is_recorded = True
        finally:
            if is_recorded:
                self.monitor.wait_for(None)

    def help(self, act: Callable[[], None], seconds: float) -> None:
        """Run ``act``, then sleep until this rank's helper is woken; at most ``seconds``."""

        def acted() -> bool:
            act()
            return False

        self._sleep(_HELPERS, acted, seconds)

    def _failure(
        self, doing: Callable[[], str], missing: Callable[[], Sequence[int]]
    ) -> RankFailed | None:
        """The error if a rank failed, or if a missing rank left or died; else None."""
        if self._left is not None:
            return RankFailed(self.job_ranks[self.rank], self._left, doing())
        for rank in range(self.size):
            if self._state(rank) == _FAILED and rank != self.rank:
                at_fault = self._words[self._at(rank, _AT_FAULT)]
                return RankFailed(at_fault, self._text(rank), doing())
        dead = self._dead()
        for rank in missing():
            if rank == self.rank:
                continue
            if self._state(rank) == _LEFT:
                return RankFailed(self.job_ranks[rank], "returned and left the world", doing())
            if rank in dead:
                died = f"died{self._where(rank)}: it was killed, crashed or called os._exit"
                return RankFailed(self.job_ranks[rank], died, doing())
        return None

    def _where(self, rank: int) -> str:
        entry = self.monitor.status(self.job_ranks[rank])
        return "" if entry is None else f" {entry.where}"

    def _sleep(self, kind: int, done: Callable[[], bool], seconds: float) -> None:
        """Sleep until a bell rings after ``done()`` was false; at most ``seconds``."""
        words, at = self._words, self._at(self.rank, kind)
        with self._sleep_lock:
            self._num_sleepers[kind] += 1
            words[at + 1] = self._num_sleepers[kind]
        try:
            seen = words[at]
            fence()  # others must see the sleeper before this thread checks for the last time
            if not done():
                self._bells[kind][self.rank].wait(seen, seconds)
        finally:
            with self._sleep_lock:
                self._num_sleepers[kind] -= 1
                words[at + 1] = self._num_sleepers[kind]

    def named(self, ranks: Sequence[int]) -> list[int]:
        """These ranks of the table in the job."""
        return [self.job_ranks[rank] for rank in ranks]

    # Reading the table -----------------------------------------------------------------------

    @staticmethod
    def _at(rank: int, field: int) -> int:
        return rank * _WORDS + field

    def pid(self, rank: int) -> int:
        """The process of ``rank``, which has joined."""
        return self._words[self._at(rank, _PID)]

    def _state(self, rank: int) -> int:
        return self._words[rank * _WORDS + _STATE]

    def _text(self, rank: int) -> str:
        start = rank * _PAGE + _TEXT_START
        length = self._words[self._at(rank, _TEXT_LENGTH)]
        return bytes(self._bytes[start : start + length]).decode(errors="replace")

    def _dead(self) -> set[int]:
        """Ranks whose process has ended; a zombie counts. None can be seen once this rank left."""
        if self._has_left:
            return set()
        poll = select.poll()
        by_descriptor = {descriptor: rank for rank, descriptor in self._pidfds.items()}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        # A descriptor that this rank has closed meanwhile is no sign of a death.
        dead = {by_descriptor[each] for each, event in poll.poll(0) if event & select.POLLIN}
        joined = {r for r in range(self.size) if self._state(r) == _HERE and r != self.rank}
        return dead | (joined - set(self._pidfds))
