"""Events as a timeline for Perfetto and Chrome's tracing page, in which a rank is a process.

A collective is a span from its issue to the end of its wait, in a lane of its group. The format is
the JSON object form of the Trace Event Format. Times are in microseconds; ``ph`` is X for a span, i
for a moment, C for a counter, and M for a name.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from echelon import checks
from echelon.errors import ArgumentError
from echelon.events import Event
from echelon.process.atomic_files import replace_file
from echelon.process.plain_file import read_plain

# Lanes of one rank, as threads of its process in the timeline. Those of groups follow.
LANES = {"backward": 0, "communication": 1, "other": 2}

_CLOCK = (
    "baseTimeNanoseconds"  # the field of torch.profiler's files for the time that ts count from
)
_MAX_NBYTES = 1 << 32
_MERGED_PID = 1 << 24  # ranks of a merged file, because no Linux process has so large a number

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
        self._issued_s: dict[tuple[str, str, int], float] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Keep one event."""
        if event.facts.get("rank") != self.rank:
            return
        with self._lock:
            for row in (self._row(event), self._call(event)):
                if row is None:
                    continue
                if len(self.rows) < self._limit:
                    self.rows.append(row)
                else:
                    self.dropped += 1

    def _call(self, event: Event) -> Row | None:
        """The span of a whole call, from its issue, when ``event`` is the end of its wait."""
        if event.name not in ("collective.issue", "collective.wait"):
            return None
        facts = {key: value for key, value in event.facts.items() if value is not None}
        key = facts.get("group", ""), facts["op"], facts.get("position", 0)
        if event.name == "collective.issue":
            self._issued_s[key] = event.start_s
            return None
        start_s = self._issued_s.pop(key, None)
        if start_s is None:  # it was issued before this trace began, or waited for twice
            return None
        name = facts["op"] + (f" {facts['label']}" if "label" in facts else "")
        end_s = event.start_s + event.seconds
        return self._span(name, start_s, end_s - start_s, facts, f"group {facts['group']}")

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
            "tid": LANES.get(lane, lane),  # write_trace numbers the lanes of groups
            "args": facts,
        }


def write_trace(path: str | os.PathLike[str], ranks: Sequence[Iterable[Row]]) -> None:
    """Write one timeline from the rows of each rank, in rank order.

    Clocks of different hosts differ, so only ranks of one host can be compared.
    """
    row_lists = [list(rows) for rows in ranks]
    first = min((row["ts"] for rows in row_lists for row in rows), default=0.0)
    written: list[Row] = []
    for rank, rank_rows in enumerate(row_lists):
        for row in rank_rows:
            row["ts"] = round(row["ts"] - first, 3)
            if "dur" in row:
                row["dur"] = round(row["dur"], 3)
        names = _place(rank_rows)
        written.append(_name("process_name", rank, {"name": f"rank {rank}"}))
        written.append(_name("process_sort_index", rank, {"sort_index": rank}))
        for number, name in names.items():
            written.append(_name("thread_name", rank, {"name": name}) | {"tid": number})
        written.extend(rank_rows)
    content = {
        "traceEvents": written,
        "displayTimeUnit": "ms",
        _CLOCK: time.time_ns() - time.perf_counter_ns() + round(first * 1e3),
        "otherData": {"written": time.strftime("%Y-%m-%d %H:%M:%S")},
    }
    replace_file(Path(path), json.dumps(content, default=str).encode(), sync=False)


def merge_traces(
    trace: str | os.PathLike[str],
    profiles: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
) -> None:
    """Write one timeline from the ``trace.json`` of a run and files of ``torch.profiler``.

    All must be of one host, because clocks of different hosts differ.

    Args:
        trace: what a ``Recorder`` with ``trace=True`` has written.
        profiles: files that ``export_chrome_trace`` of ranks has written, not compressed.
        output: the file to write.

    Raises:
        ArgumentError: a file cannot be read, or is no timeline that says when its time begins.

    Example:
        >>> # merge_traces("runs/gpt/trace.json", ["rank0.json", "rank1.json"], "merged.json")
    """
    if isinstance(profiles, str) or not isinstance(profiles, Sequence):
        raise ArgumentError(f"profiles is {profiles!r:.80}; give a list of paths")
    checks.path("output", output)
    merged = _timeline(trace)
    for row in merged["traceEvents"]:
        row["pid"] += _MERGED_PID
    for path in profiles:
        profile = _timeline(path)
        shift = (profile[_CLOCK] - merged[_CLOCK]) / 1e3  # in microseconds
        for row in profile["traceEvents"]:
            if "ts" in row:
                row["ts"] += shift
        merged["traceEvents"] += profile["traceEvents"]
    replace_file(Path(output), json.dumps(merged).encode(), sync=False)


def _timeline(path: str | os.PathLike[str]) -> Row:
    """The content of a file in the Trace Event Format that says when its time begins."""
    checks.path("the trace", path)
    try:
        content = json.loads(read_plain(path, _MAX_NBYTES, follows=True))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"cannot read the timeline {os.fspath(path)!r}: {error}") from error
    if (
        not isinstance(content, dict)
        or not isinstance(content.get(_CLOCK), int)
        or not isinstance(content.get("traceEvents"), list)
    ):
        raise ArgumentError(
            f"{os.fspath(path)!r} has no 'traceEvents' or no {_CLOCK!r}: give the trace.json of a "
            "run, and files of export_chrome_trace of torch.profiler"
        )
    return content


def _name(kind: str, rank: int, arguments: Row) -> Row:
    return {"name": kind, "ph": "M", "pid": rank, "args": arguments}


def _place(rows: Sequence[Row]) -> dict[int, str]:
    """Number the lanes of ``rows`` so that spans of a lane nest; returns their names by number.

    Calls of a group may overlap without nesting, which viewers refuse, so such a lane is split.
    """
    numbers: dict[tuple[Any, int], int] = {(number, 1): number for number in LANES.values()}
    names = {number: lane for lane, number in LANES.items()}
    open_ends: dict[tuple[Any, int], list[int]] = {}  # in ns, of the spans around the current one
    for row in sorted(rows, key=lambda row: (row["ts"], -row.get("dur", 0.0))):
        lane, copy = row["tid"], 1
        start = round(row["ts"] * 1e3)
        end = start + round(row.get("dur", 0.0) * 1e3)
        while row["ph"] == "X":
            ends = open_ends.setdefault((lane, copy), [])
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                ends.append(end)
                break
            copy += 1
        number = numbers.setdefault((lane, copy), len(numbers))
        name = names[lane] if isinstance(lane, int) else lane
        names.setdefault(number, name if copy == 1 else f"{name} ({copy})")
        row["tid"] = number
    return names
