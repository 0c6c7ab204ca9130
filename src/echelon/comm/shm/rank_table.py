"""What the processes of one job know of each other: who is there, who left, who sleeps, who failed.

The board is one segment with a page a rank; each word has one writer, so no atomic operation is
needed::

    rank r:  | state | pid | text length | at fault | bell | sleepers | bell | sleepers |
             | note length | … note … | … text … |

The note is what a rank brings to the job, the text how it failed.

A bell is the exception: anyone writes it, always with a value that nobody wrote before, so that a
thread which read it, looked around and then goes to sleep on it cannot miss a change in between.
One bell of a rank is for whatever its owner may wait for, the other for its *helpers*: threads that
move data while the owner computes, and that small changes need not wake.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import final

from echelon.comm.shm.futex import Bell, fence
from echelon.comm.shm.segment import Segment
from echelon.diagnosis.rank_monitor import RankMonitor
from echelon.errors import CommTimeout, RankFailed
from echelon.errors.message_text import text_bytes

_PAGE = 4096
_WORDS = _PAGE // 4
_STATE, _PID, _TEXT_LENGTH, _AT_FAULT = range(4)
# Each is a bell; the word after it counts who sleeps on it.
_OWNER, _HELPERS = 4, 6
_NOTE_LENGTH = 8
_NOTE_START, _TEXT_START = 64, 1024  # in bytes
_ABSENT, _HERE, _LEFT, _FAILED = range(4)

# A sleeping rank looks around this often even if no bell rings: peers can die without a sound.
_LOOK_S = 0.05
# Spinning saves two context switches where a peer is about to come; it pays while each rank has a
# core.
_SPIN_S = 0.0001


@final
class RankTable:
    """The page of every rank of a job, and the sleeping and waking between them.

    Args:
        segment: of ``RankTable.nbytes(size)``.
        rank: of this process in the job.
        size: number of ranks in the job.
        monitor: what this process tells of itself, and sees of the others.
    """

    def __init__(self, segment: Segment, rank: int, size: int, monitor: RankMonitor) -> None:
        self.segment, self.rank, self.size, self.monitor = segment, rank, size, monitor
        self._bytes = memoryview(segment.buffer)
        self._words = self._bytes.cast("I")
        base = ctypes.addressof(ctypes.c_char.from_buffer(segment.buffer))
        self._bells = {
            kind: [Bell(base + r * _PAGE + kind * 4) for r in range(size)]
            for kind in (_OWNER, _HELPERS)
        }
        self._rings = itertools.count(1)  # unlike an integer, safe to advance from many threads
        self._pidfds: dict[int, int] = {}
        self._num_sleepers = {_OWNER: 0, _HELPERS: 0}
        self._sleep_lock = threading.Lock()
        self.spin_s = _SPIN_S if size <= len(os.sched_getaffinity(0)) else _SPIN_S / 20

    @staticmethod
    def nbytes(size: int) -> int:
        """Bytes of a board for ``size`` ranks."""
        return size * _PAGE

    # Joining and leaving ---------------------------------------------------------------------

    def join(self, note: bytes, timeout: float) -> None:
        """Put this rank on the board and return when all are on it.

        Args:
            note: for ``notes`` of all ranks.

        Raises:
            CommTimeout: some rank did not come.
        """
        assert len(note) <= _TEXT_START - _NOTE_START, "facts of a start are short"
        start = self.rank * _PAGE + _NOTE_START
        self._bytes[start : start + len(note)] = note
        self._words[self._at(self.rank, _NOTE_LENGTH)] = len(note)
        self._words[self._at(self.rank, _PID)] = os.getpid()
        fence()
        self._words[self._at(self.rank, _STATE)] = _HERE
        everyone = [r for r in range(self.size) if r != self.rank]
        self.ring(everyone)
        deadline = time.monotonic() + timeout
        while missing := [r for r in everyone if self._state(r) == _ABSENT]:
            self._sleep(_OWNER, lambda: self._state(missing[0]) != _ABSENT, _LOOK_S)
            if time.monotonic() > deadline:
                late = f"rank {self.rank}, starting a world of {self.size} ranks,"
                raise self.monitor.explained(CommTimeout(late, missing, timeout))
        for r in everyone:
            # One that died already has no descriptor, and counts as dead by that.
            with suppress(ProcessLookupError):
                self._pidfds[r] = os.pidfd_open(self._words[self._at(r, _PID)])

    def notes(self) -> list[bytes]:
        """What each rank brought when it joined, in rank order."""
        found = []
        for rank in range(self.size):
            start = rank * _PAGE + _NOTE_START
            length = self._words[self._at(rank, _NOTE_LENGTH)]
            found.append(bytes(self._bytes[start : start + length]))
        return found

    def leave(self, failure: str | None, at_fault: int | None = None) -> None:
        """Note that this rank ends, and why if it failed; wakes all ranks.

        Args:
            failure: what the rank at fault did, as others read it.
            at_fault: another rank, if this one ends only because that one failed.
        """
        if failure is not None:
            text = text_bytes(failure)[: _PAGE - _TEXT_START]
            start = self.rank * _PAGE + _TEXT_START
            self._bytes[start : start + len(text)] = text
            self._words[self._at(self.rank, _TEXT_LENGTH)] = len(text)
            self._words[self._at(self.rank, _AT_FAULT)] = (
                self.rank if at_fault is None else at_fault
            )
            fence()
        self._words[self._at(self.rank, _STATE)] = _LEFT if failure is None else _FAILED
        self.ring(r for r in range(self.size) if r != self.rank)
        for descriptor in self._pidfds.values():
            os.close(descriptor)
        self._pidfds.clear()
        self.monitor.close()

    # Sleeping and waking ---------------------------------------------------------------------

    def ring(self, ranks: Iterable[int]) -> None:
        """Tell ``ranks`` that something they may wait for has changed. Call after the change."""
        self._ring(_OWNER, ranks)

    def call_helpers(self, rank: int) -> None:
        """Tell ``rank`` that there is something to be done while its owner computes."""
        self._ring(_HELPERS, (rank,))

    def _ring(self, kind: int, ranks: Iterable[int]) -> None:
        value = (next(self._rings) * self.size + self.rank) & 0xFFFFFFFF  # no other ring has it
        words = self._words
        sleepers = []
        for rank in ranks:
            words[rank * _WORDS + kind] = value
            sleepers.append(rank)
        fence()  # or the sleepers might be read before the change is seen
        for rank in sleepers:
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

        Args:
            ready: reads shared memory; cheap.
            doing: the call that waits, for the message of an error.
            missing: ranks in the job that have not come.
            timeout: seconds.
            spin: whether this thread may spin; it holds the interpreter while it does.

        Raises:
            RankFailed: a rank failed, or one that is missing left or died.
            CommTimeout: time is up.
        """
        now = time.perf_counter
        if spin:
            end = now() + self.spin_s
            while now() < end:
                if ready():
                    return
        deadline = now() + timeout
        told = False
        try:
            while not ready():
                self._sleep(_OWNER, ready, min(_LOOK_S, max(0.0, deadline - now())))
                failure = self._failure(doing, missing)
                # After that, and not before: a rank that left may have done its part first.
                if ready():
                    return
                if failure is not None:
                    raise failure
                if now() >= deadline:
                    self.monitor.give_up(late := missing())  # before it looks as if we computed
                    raise CommTimeout(doing(), late, timeout)
                # Each time: another thread of this rank may have ended a wait.
                if late := missing():
                    self.monitor.wait_for(late[0])
                    told = True
        finally:
            if told:
                self.monitor.wait_for(None)

    def help(self, act: Callable[[], None], seconds: float) -> None:
        """Run ``act``, then sleep until helpers are called who were not before ``act`` began.

        Args:
            seconds: sleep no longer.
        """

        def acted() -> bool:
            act()
            return False

        self._sleep(_HELPERS, acted, seconds)

    def _failure(
        self, doing: Callable[[], str], missing: Callable[[], Sequence[int]]
    ) -> RankFailed | None:
        """That a rank failed, or that one which is waited for left or died; None if neither."""
        for rank in range(self.size):
            if self._state(rank) == _FAILED and rank != self.rank:
                at_fault = self._words[self._at(rank, _AT_FAULT)]
                return RankFailed(at_fault, self._text(rank), doing())
        dead = self._dead()
        for rank in missing():
            if rank == self.rank:
                continue
            if self._state(rank) == _LEFT:
                return RankFailed(rank, "returned and left the world", doing())
            if rank in dead:
                died = f"died{self._where(rank)}: it was killed, crashed or called os._exit"
                return RankFailed(rank, died, doing())
        return None

    def _where(self, rank: int) -> str:
        entry = self.monitor.status(rank)
        return "" if entry is None else f" {entry.where}"

    def _sleep(self, kind: int, done: Callable[[], bool], seconds: float) -> None:
        """Sleep until a bell rings after ``done()`` was false; at most ``seconds``."""
        words, at = self._words, self._at(self.rank, kind)
        with self._sleep_lock:
            self._num_sleepers[kind] += 1
            words[at + 1] = self._num_sleepers[kind]
        try:
            seen = words[at]
            fence()  # the others must see a sleeper before we look for the last time
            if not done():
                self._bells[kind][self.rank].wait(seen, seconds)
        finally:
            with self._sleep_lock:
                self._num_sleepers[kind] -= 1
                words[at + 1] = self._num_sleepers[kind]

    # Reading the board -----------------------------------------------------------------------

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
        """Ranks whose process has ended; a zombie counts."""
        poll = select.poll()
        by_descriptor = {descriptor: rank for rank, descriptor in self._pidfds.items()}
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        dead = {by_descriptor[descriptor] for descriptor, _ in poll.poll(0)}
        joined = {r for r in range(self.size) if self._state(r) == _HERE and r != self.rank}
        return dead | (joined - set(self._pidfds))
