"""What one rank holds during one step, looked at whenever something happens."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, final

from echelon.events import Event

Look = Callable[[], Mapping[str, int]]


@final
class RankTimeline:
    """Bytes by category at every event of one rank. A listener.

    Args:
        rank: whose events count, in the job.
        look: finds the bytes that are held now, by category.

    Example:
        >>> timeline = RankTimeline(0, lambda: {"gathered": 400})
        >>> timeline(Event("fsdp.gather", 0.0, 0.0, dict(rank=0, unit="root", nbytes=400)))
        >>> timeline.record()["nbytes"]
        {'gathered': [400, 400]}
    """

    def __init__(self, rank: int, look: Look) -> None:
        self.rank = rank
        self._look = look
        self._lock = threading.Lock()  # communication may emit from a thread of its own
        self._start_s = time.perf_counter()
        self._times_s: list[float] = []
        self._found: list[Mapping[str, int]] = []
        self._note()

    def __call__(self, event: Event) -> None:
        """Look, if the event is one of this rank."""
        if event.facts.get("rank") == self.rank:
            self._note()

    def _note(self) -> None:
        with self._lock:
            self._times_s.append(time.perf_counter() - self._start_s)
            self._found.append(self._look())

    def record(self) -> dict[str, Any]:
        """Seconds since the start, and bytes by category, one number for each time."""
        with self._lock:
            names = dict.fromkeys(name for found in self._found for name in found)
            return {
                "time_s": [round(seconds, 6) for seconds in self._times_s],
                "nbytes": {name: [one.get(name, 0) for one in self._found] for name in names},
            }
