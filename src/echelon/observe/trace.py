"""Events as a timeline for Perfetto and Chrome's tracing page, in which a rank is a process.

The format is the JSON object form of the Trace Event Format. Times are in microseconds; ``ph`` is X
for a span, i for a moment, C for a counter, and M for a name.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from echelon import checks
from echelon.events import Event

# Lanes of one rank, as threads of its process in the timeline.
LANES = {"backward": 0, "communication": 1, "other": 2}

Row = dict[str, Any]


class Trace:
    """A listener that keeps the events of one rank as rows of a timeline.

    Attributes:
        rank: the rank in the job whose events are kept.
        rows: the events in the Trace Event Format.
        dropped: the number of events that were left out because there were ``limit`` already.

    Example:
        >>> trace = Trace(rank=0)
        >>> trace(Event("collective.wait", 2.0, 0.5, dict(rank=0, op="all_reduce", nbytes=8)))
        >>> trace.rows[0]["ph"], trace.rows[0]["ts"], trace.rows[0]["dur"]
        ('X', 2000000.0, 500000.0)
    """

    def __init__(self, rank: int, limit: int = 200_000) -> None:
        self.rank = checks.integer("rank", rank)
        self.rows: list[Row] = []
        self.dropped = 0
        self._limit = checks.integer("limit", limit)
        self._memory: dict[str, int] = {}
        self._begun: float | None = None
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Keep one event."""
        if event.facts.get("rank") != self.rank:
            return
        with self._lock:
            row = self._row(event)
            if row is None:
                return
            if len(self.rows) < self._limit:
                self.rows.append(row)
            else:
                self.dropped += 1

    def _row(self, event: Event) -> Row | None:
        """The row that shows ``event``; None for the first half of a span."""
        facts = {key: value for key, value in event.facts.items() if value is not None}
        if event.name == "memory":
            category = facts["category"]
            self._memory[category] = self._memory.get(category, 0) + facts["nbytes"]
            return self._make("memory", "C", event.start_s, dict(self._memory), "other")
        if event.name == "ddp.backward":
            if facts["phase"] == "begin":
                self._begun = event.start_s
                return None
            start_s = event.start_s if self._begun is None else self._begun
            return self._span("backward", start_s, event.start_s - start_s, {}, "backward")
        if event.name.startswith(("collective.", "p2p.")):
            action = event.name.partition(".")[2]
            name = f"{action} {facts['op']}" + (f" {facts['label']}" if "label" in facts else "")
            lane = "communication"
        else:
            name, lane = event.name, "other"
        if event.seconds:
            return self._span(name, event.start_s, event.seconds, facts, lane)
        return self._make(name, "i", event.start_s, facts, lane) | {"s": "t"}

    def _span(self, name: str, start_s: float, seconds: float, facts: Row, lane: str) -> Row:
        return self._make(name, "X", start_s, facts, lane) | {"dur": seconds * 1e6}

    def _make(self, name: str, phase: str, start_s: float, facts: Row, lane: str) -> Row:
        return {
            "name": name,
            "ph": phase,
            "ts": start_s * 1e6,
            "pid": self.rank,
            "tid": LANES[lane],
            "args": facts,
        }


def write_trace(path: str | os.PathLike[str], ranks: Sequence[Iterable[Row]]) -> None:
    """Write one timeline from the rows of each rank, in rank order.

    Clocks of different hosts differ, so only ranks of one host can be compared.
    """
    rows: list[Row] = []
    for rank, rank_rows in enumerate(ranks):
        rows.append(
            {"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}}
        )
        rows.append(
            {"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}}
        )
        for lane, number in LANES.items():
            named = {"name": "thread_name", "ph": "M", "pid": rank, "tid": number}
            rows.append(named | {"args": {"name": lane}})
        rows.extend(rank_rows)
    first = min((row["ts"] for row in rows if "ts" in row), default=0.0)
    for row in rows:
        if "ts" in row:
            row["ts"] = round(row["ts"] - first, 3)
    content = {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {"written": time.strftime("%Y-%m-%d %H:%M:%S")},
    }
    with open(path, "w") as file:
        json.dump(content, file, default=str)
