"""Happens-before: what does its work in order, how its clock is joined, and which accesses race.

This file knows nothing of torch, and nothing of how an operation runs.

A *line* does its work in order: a stream, a thread of the host, a communicator. Each line counts
its operations, and knows up to which operation of each other line all is done before its own next
one. Operations are noted in the order in which the program issues them, whenever they run; the
clocks say whether its waits would order them on any device. So one run finds the races of all
timings of the program.

An access of a line is *before* now of another line if that line knows of it. Two accesses of the
same bytes, one of which writes, must have an order. Memory belongs to the line on which it was
allocated, and is used again in the order of that line as soon as it is freed, as by the caching
allocator of CUDA. So an allocation is a write of its line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, final


@final
class Point(NamedTuple):
    """What a line knew when it was asked: an event.

    Attributes:
        clock: by line, the number of its operations that are done.
        time: when that is, in the unit of the costs.
    """

    clock: Mapping[Line, int]
    time: float


@final
class Line:
    """Does its operations one after another.

    Attributes:
        name: for reports.
        time: when its last operation is over.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._clock: dict[Line, int] = {self: 0}
        self.time = 0.0

    def now(self) -> Point:
        """The point after all its operations."""
        return Point(dict(self._clock), self.time)

    def join(self, point: Point) -> None:
        """Do all that follows after ``point``."""
        clock = self._clock
        for line, tick in point.clock.items():
            if clock.get(line, -1) < tick:
                clock[line] = tick
        self.time = max(self.time, point.time)

    def knows(self, line: Line, tick: int) -> bool:
        """Whether operation ``tick`` of ``line`` is before all that follows here."""
        return self._clock.get(line, -1) >= tick

    def operate(self, cost: float) -> int:
        """Do an operation; returns its number."""
        self._clock[self] += 1
        self.time += cost
        return self._clock[self]


@final
class Operation(NamedTuple):
    """What is done, where in the program, on which line."""

    name: str
    place: str
    line: str

    def __str__(self) -> str:
        return f"{self.name} on {self.line} at {self.place}"


@final
class Access(NamedTuple):
    """An operation of a line that has read or written bytes of a memory."""

    line: Line
    tick: int
    operation: Operation


@final
@dataclass(frozen=True)
class Finding:
    """Two operations of which nothing says which comes first.

    Attributes:
        kind: such as ``"write after read"``, or ``"use after free"``.
        first, second: in program order.
        nbytes: the bytes of the memory.
    """

    kind: str
    first: Operation
    second: Operation
    nbytes: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.nbytes} bytes: {self.first}, and {self.second}"


Ranges = Iterable[tuple[int, int]]  # of bytes, half-open


@final
class Memory:
    """The accesses of one allocation.

    Attributes:
        pool: the line in whose order it is used again; None: it is not, or only when it is idle.
        nbytes: its length.
    """

    def __init__(self, pool: Line | None, nbytes: int) -> None:
        self.pool, self.nbytes = pool, nbytes
        self._other_users: set[Line] = set()
        # By line, range and whether it writes: the last such access. Earlier ones are before it.
        self._accesses: dict[tuple[Line, int, int, bool], Access] = {}

    def touch(self, ranges: Ranges, access: Access, *, writes: bool) -> list[Finding]:
        """Note an access; returns the races with earlier ones."""
        findings, line = [], access.line
        for start, end in ranges:
            ordered = []
            for key, before in self._accesses.items():
                other, first, last, wrote = key
                if first >= end or last <= start or not (writes or wrote):
                    continue
                if other is line or line.knows(other, before.tick):
                    if writes and start <= first and last <= end:
                        ordered.append(key)  # what races with it races with this write, too
                    continue
                kind = f"{'write' if writes else 'read'} after {'write' if wrote else 'read'}"
                findings.append(Finding(kind, before.operation, access.operation, self.nbytes))
            for key in ordered:
                del self._accesses[key]
            self._accesses[line, start, end, writes] = access
        return findings

    def outlives(self, line: Line) -> None:
        """Be used again only after what ``line`` has done when it is freed: ``record_stream``."""
        self._other_users.add(line)

    def free(self) -> None:
        """Be given back: it waits for what the other users know now, and not for more."""
        for key, access in list(self._accesses.items()):
            if any(line.knows(access.line, access.tick) for line in self._other_users):
                del self._accesses[key]

    def uses_after(self) -> list[Operation]:
        """The operations that may still use it, which is free, if its pool hands it out now."""
        pool = self.pool
        if pool is None:
            return []
        return [
            access.operation
            for access in self._accesses.values()
            if access.line is not pool and not pool.knows(access.line, access.tick)
        ]
