"""What a rank communicated: calls, bytes and seconds waited, per operation."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from echelon import checks
from echelon.events import Event

# Calls on which ranks must agree, but which move no tensors.
_SET_UP = {"subgroup", "window"}


@dataclass(slots=True)
class CommTotal:
    """All calls of one operation by one rank.

    Attributes:
        calls: how many were issued.
        nbytes: sum of the sizes of the tensors that they were about.
        wait_s: seconds that the rank was held up until results were there.
    """

    calls: int = 0
    nbytes: int = 0
    wait_s: float = 0.0


class CommMeter:
    """Communication of one rank per operation, from ``collective`` and ``p2p`` events. A listener.

    Attributes:
        rank: whose events count, in the job.
        totals: by operation, in order of first call.

    Example:
        >>> meter = CommMeter(rank=1)
        >>> meter(Event("collective.issue", 0.0, 0.0, dict(rank=1, op="all_reduce", nbytes=8)))
        >>> meter(Event("collective.wait", 0.0, 0.5, dict(rank=1, op="all_reduce", nbytes=8)))
        >>> meter.totals
        {'all_reduce': CommTotal(calls=1, nbytes=8, wait_s=0.5)}
    """

    def __init__(self, rank: int) -> None:
        self.rank = checks.whole("rank", rank)
        self.totals: dict[str, CommTotal] = {}
        self._lock = threading.Lock()  # hooks of a backward may issue from other threads

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if event.name not in ("collective.issue", "collective.wait"):
            return
        facts = event.facts
        if facts["rank"] != self.rank or facts["op"] in _SET_UP:
            return
        with self._lock:
            total = self.totals.setdefault(facts["op"], CommTotal())
            if event.name == "collective.wait":
                total.wait_s += event.seconds
            else:
                total.calls += 1
                total.nbytes += facts["nbytes"]
