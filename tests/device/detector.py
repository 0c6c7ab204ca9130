"""The detector of one rank: its lines, its memories, what was found, and where the host waited."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, final

from echelon.testing.device.clocks import Finding, Line, Memory, Operation, Point
from echelon.testing.device.races import Part, Races

_SOURCE = str(Path(__file__).parents[2] / "src")
_HERE = str(Path(__file__).parent)


@final
class Thread:
    """A thread of the host, and the stream that is current in it."""

    def __init__(self, line: Line, current: Line) -> None:
        self.line, self.current = line, current


@final
class Detector:
    """Watches one rank.

    Args:
        costs: the time of an operation, by its name and the bytes that it writes; None: nothing
            takes time.
        dropped: a place, as ``places`` has them, at which waits are left out; or one of
            ``stream_places``, at which work stays on the current stream.

    Attributes:
        host_waits: how often the host waited for a device, by place.
        places: how often a wait was issued, by place.
        stream_places: how often a stream was made current, by place.
        foreign: the streams that a thread used which is not that of the rank.
        mixed: the places at which an operator got tensors of both memories.
    """

    def __init__(
        self,
        name: str = "rank 0",
        *,
        costs: Callable[[str, int], float] | None = None,
        dropped: str | None = None,
    ) -> None:
        self.name = name
        self.host_waits: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.stream_places: Counter[str] = Counter()
        self.foreign: Counter[str] = Counter()
        self.mixed: Counter[str] = Counter()
        self.dropped = dropped
        self._costs = costs
        self._races = Races()
        self._communicators: dict[object, Line] = {}
        self.default = Line("the default stream")
        self._streams = [self.default]
        self._lock = threading.Lock()
        self._owner = 0
        self._threads: dict[int, Thread] = {}

    def of_another_rank(self, rank: int) -> Detector:
        """A detector for another rank of the job, which leaves the same waits out."""
        return Detector(f"rank {rank}", costs=self._costs, dropped=self.dropped)

    def take(self, other: Detector) -> None:
        """Take over what was found on another rank."""
        self._races.take(other._races)
        for mine, theirs in (
            (self.host_waits, other.host_waits),
            (self.places, other.places),
            (self.stream_places, other.stream_places),
            (self.foreign, other.foreign),
            (self.mixed, other.mixed),
        ):
            mine.update(theirs)

    @property
    def findings(self) -> list[Finding]:
        """The races, without repetitions."""
        return self._races.findings

    # Lines -----------------------------------------------------------------------------------

    @property
    def thread(self) -> Thread:
        """The thread that asks; that of the rank, where the garbage collector runs in another."""
        return self._threads.get(threading.get_ident(), self._threads[self._owner])

    @property
    def is_beside(self) -> bool:
        """Whether the thread that asks is not that of the rank; it makes tensors on the host."""
        return threading.get_ident() in self._threads and threading.get_ident() != self._owner

    @property
    def current(self) -> Line:
        """The stream that is current in the thread that asks."""
        return self.thread.current

    @property
    def host(self) -> Line:
        """The thread of the host that asks."""
        return self.thread.line

    def begin(self) -> None:
        """The thread that asks is that of the rank."""
        self._owner = threading.get_ident()
        self._threads = {self._owner: Thread(Line("the host"), self.default)}

    def begin_thread(self, start: Point) -> None:
        """The thread that asks begins after ``start``; the default stream is current in it."""
        line = Line(f"thread {len(self._threads)} of the host")
        line.join(start)
        self._threads[threading.get_ident()] = Thread(line, self.default)

    def end_thread(self) -> Point:
        """The thread that asks ends."""
        return self._threads.pop(threading.get_ident()).line.now()

    def new_stream(self) -> Line:
        """A stream beside the current one."""
        self._streams.append(Line(f"stream {len(self._streams)}"))
        return self._streams[-1]

    def all_streams(self) -> list[Line]:
        """All streams of the device."""
        return list(self._streams)

    def communicator(self, key: object) -> Line:
        """The line of a communicator."""
        if key not in self._communicators:
            self._communicators[key] = Line(f"communicator {key}")
        return self._communicators[key]

    def end_of_all(self) -> float:
        """When all that was issued is over; everything that follows begins then."""
        lines = [*self._streams, *self._communicators.values(), self.host]
        end = max(line.time for line in lines)
        for line in lines:
            line.time = end
        return end

    @contextmanager
    def as_current(self, line: Line) -> Iterator[None]:
        """Make a stream current in the body, unless this is where that is left out."""
        thread, place = self.thread, f"stream of {place_of_call()}"
        self.stream_places[place] += 1
        before = thread.current
        thread.current = before if place == self.dropped else line
        try:
            yield
        finally:
            thread.current = before

    # Order -----------------------------------------------------------------------------------

    def wait(self, line: Line, point: Point) -> None:
        """Let a stream wait, unless this is the place at which that is left out."""
        place = place_of_call()
        self.places[place] += 1
        if place != self.dropped:
            line.join(point)

    def wait_on_host(self, point: Point) -> None:
        """Let the host wait for a device, likewise."""
        place = place_of_call()
        self.places[place] += 1
        self.host_waits[place] += 1
        if place != self.dropped:
            self.host.join(point)

    def read_on_host(self, point: Point) -> None:
        """Let the host wait for a value that it reads, which no place can leave out."""
        self.host_waits[place_of_call()] += 1
        self.host.join(point)

    # Operations ------------------------------------------------------------------------------

    def operate(
        self, name: str, line: Line, reads: Sequence[Part] = (), writes: Sequence[Part] = ()
    ) -> None:
        """An operation that the host has launched on a line, or does itself."""
        if line is not self.host:
            line.join(self.host.now())  # it was launched after what the host has waited for
            if self.is_beside:
                self.foreign[line.name] += 1
        cost = 0.0
        if self._costs is not None:
            cost = self._costs(
                name, sum(end - start for _, ranges in writes for start, end in ranges)
            )
        operation = Operation(name, place_of_call(), line.name)
        with self._lock:
            self._races.operate(operation, line, reads, writes, cost)

    def free(self, memory: Memory) -> None:
        """Memory was given back."""
        with self._lock:
            self._races.free(memory)

    def allocate(self, pool: Line) -> None:
        """A pool hands out memory; it may be any of its line."""
        operation = Operation("allocation", place_of_call(), pool.name)
        with self._lock:
            self._races.allocate(pool, operation)

    def still_used(self) -> list[Operation]:
        """What may still use memory that was given back and was not handed out since."""
        return self._races.still_used()


def place_of_call() -> str:
    """The innermost line of the package outside of ``comm`` that is running, else of a test."""
    frame: Any = sys._getframe(1)
    outside = "unknown"
    while frame is not None:
        file: str = frame.f_code.co_filename
        if file.startswith(_SOURCE):
            if "/echelon/comm/" not in file:
                return f"{file[len(_SOURCE) + 9 :]}:{frame.f_code.co_name}:{frame.f_lineno}"
        elif outside == "unknown" and "/torch/" not in file and not file.startswith(_HERE):
            outside = f"{file.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return outside
