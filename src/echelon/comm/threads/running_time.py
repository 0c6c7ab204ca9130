"""A clock that stands still while a debugger has stopped the ranks of this process.

All limits of time of simulated ranks are measured by it, so that nobody is late because a user
looks at a variable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class _Stops:
    """When the clock stood still.

    Attributes:
        stood: the nanoseconds at which it stopped, if it stands, and how many it has stood before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_stops = 0  # that last now
        # One tuple, so that to read the clock needs no lock.
        self.stood: tuple[int | None, int] = None, 0

    def now_ns(self) -> int:
        """Nanoseconds since some moment, without those in which ranks were stopped."""
        since_ns, stopped_ns = self.stood
        return (time.monotonic_ns() if since_ns is None else since_ns) - stopped_ns

    def now_s(self) -> float:
        """The same in seconds."""
        return 1e-9 * self.now_ns()

    def begin(self) -> None:
        """Stop the clock, once more if it stands already."""
        with self._lock:
            if not self._num_stops:
                self.stood = time.monotonic_ns(), self.stood[1]
            self._num_stops += 1

    def end(self) -> None:
        """End one stop; the clock runs again when all have ended."""
        with self._lock:
            self._num_stops -= 1
            since_ns, stopped_ns = self.stood
            if not self._num_stops and since_ns is not None:
                self.stood = None, stopped_ns + time.monotonic_ns() - since_ns


stops = _Stops()
running_ns, running_s = stops.now_ns, stops.now_s  # as they are: functions would cost calls


@contextmanager
def stopped_time() -> Iterator[None]:
    """Let the clock stand still in the body.

    Example:
        >>> before = running_s()
        >>> with stopped_time():
        ...     time.sleep(0.05)
        >>> running_s() - before < 0.04
        True
    """
    stops.begin()
    try:
        yield
    finally:
        stops.end()
