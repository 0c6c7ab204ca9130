"""The clocks of simulated ranks, which run as if each rank had a core of its own.

A rank that waits does not wait longer because its peers run one after the other. So limits of time
count the seconds of these clocks: that of a rank runs while it has its turn or blocks in Python,
and where ranks meet, all their clocks show what the latest of them shows. While somebody looks at
the ranks (``Turns.held``), no clock runs.
"""

from __future__ import annotations

import time
from typing import final

from echelon.comm.threads.running_time import running_ns, stops


@final
class Clocks:
    """A clock for each rank, and one of the world, in nanoseconds.

    The caller of a method holds the lock of the world, unless the method says otherwise.

    Args:
        size: the number of ranks.

    Attributes:
        since_ns: when the clock of each rank began to run; None if it stands.
        num_held: how many threads look at the ranks.
    """

    def __init__(self, size: int) -> None:
        self._shown_ns = [0] * size  # when they began to run, or stopped
        self.since_ns: list[int | None] = [None] * size
        self._num_running = 0
        self._is_turn_free = False
        self._idle_ns = 0
        self._idle_since_ns: int | None = None
        self.num_held = 0
        self._held_ns = 0  # how long clocks have stood still
        self._held_since_ns = 0  # if they do now

    def read(self, rank: int | None = None) -> int:
        """What the clock of a rank shows. Needs no lock.

        Args:
            rank: None for the clock of the world, which stands still only while ranks are held.
        """
        shown_ns, since_ns = (0, 0) if rank is None else (self._shown_ns[rank], self.since_ns[rank])
        if since_ns is None:
            return shown_ns
        if self.num_held:
            now_ns = self._held_since_ns
        else:  # as ``running_ns``, without its call: a call of a group reads the clock five times
            stood_ns, stopped_ns = stops.stood
            now_ns = (time.monotonic_ns() if stood_ns is None else stood_ns) - stopped_ns
        return shown_ns + now_ns - self._held_ns - since_ns

    def advance(self, rank: int, nanoseconds: int) -> None:
        """Let the clock of the rank show at least ``nanoseconds``."""
        self._shown_ns[rank] += max(0, nanoseconds - self.read(rank))

    def start(self, rank: int, now_ns: int) -> None:
        """Let the clock of the rank run from ``now_ns`` of the world on, unless it runs already."""
        if self.since_ns[rank] is None:
            self.since_ns[rank] = now_ns
            self._num_running += 1
            if self._idle_since_ns is not None:
                self._note_idleness(now_ns)

    def stop(self, rank: int) -> None:
        """Stop the clock of the rank, if it runs."""
        since_ns = self.since_ns[rank]
        if since_ns is not None:
            now_ns = self.read()
            self._shown_ns[rank] += now_ns - since_ns
            self.since_ns[rank] = None
            self._num_running -= 1
            self._note_idleness(now_ns)

    def hold(self) -> None:
        """Stop all clocks, once more if they are held already."""
        if not self.num_held:
            self._held_since_ns = running_ns()
        self.num_held += 1

    def let_go(self) -> None:
        """End one ``hold``; clocks go on when all have ended."""
        self.num_held -= 1
        if not self.num_held:
            self._held_ns += running_ns() - self._held_since_ns

    def note_turn(self, *, is_free: bool) -> None:
        """Note that from now on no rank has the turn, or that one has it again."""
        self._is_turn_free = is_free
        self._note_idleness(self.read())

    def idle_ns(self) -> int:
        """The nanoseconds in which no rank could run, as when their threads wait for each other.

        Needs no lock.
        """
        since_ns = self._idle_since_ns
        return self._idle_ns + (0 if since_ns is None else self.read() - since_ns)

    def _note_idleness(self, now_ns: int) -> None:
        since_ns = self._idle_since_ns
        if since_ns is not None:
            self._idle_ns += now_ns - since_ns
        idle = self._is_turn_free and not self._num_running
        self._idle_since_ns = now_ns if idle else None
