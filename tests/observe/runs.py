"""Lines of a run that needs no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from echelon.observe import MetricsWriter

Line = dict[str, Any]


def run_lines(ranks: int, *, finished: bool = True, first: int = 1) -> list[Line]:
    """The lines of 40 steps, from ``first`` on."""
    start = {
        "kind": "start",
        "version": 1,
        "name": "a <run>",
        "time": "2026-01-02 03:04:05",
        "unix_s": 1_000.0,
        "attempt": 0,
        "ranks": ranks,
        "backend": "threads",
        "device": "cpu",
        "total_steps": 40,
        "unit": "nats",
        "references": {"unigram entropy": 4.25},
        "config": {"lr": "<0.1>"},
        "environment": {"command": "python <train>.py", "commit": "abc"},
    }
    lines = [start, *(_step(step, first) for step in range(first, 41))]
    if first <= 20:
        save = {"kind": "save", "step": 20, "time_s": 2.0, "seconds": 0.1, "nbytes": 8}
        lines.insert(21, save)
    if not finished:
        return lines
    timelines = {
        "planned": [[0, "0F0", 0.0, 0.25], [1, "1F0", 0.25, 0.5]],
        "measured": [[0, "0F0</script>", 0.0, 0.3], [1, "1B0", 0.3, 0.625]],
    }
    summaries = [summary(rank) for rank in range(ranks)]
    waits = [[0.0 if r == s else r + 1.0 for s in range(ranks)] for r in range(ranks)]
    return [
        *lines,
        {"kind": "evaluation", "step": 40, "time_s": 4.0, "loss": 3.125},
        {"kind": "timelines", "step": 40, "timelines": timelines},
        {"kind": "note", "title": "sample", "text": "<script>alert(1)</script>"},
        {"kind": "ranks", "ranks": summaries},
        {"kind": "waits", "waited_s": waits},
        {"kind": "end", "time_s": 4.5, "steps": 40},
    ]


def _step(step: int, first: int) -> Line:
    return {
        "kind": "step",
        "step": step,
        "time_s": 0.1 * (step - first + 1),
        "loss": None if step == 5 else 5.0 - step / 20,
        "tokens_per_s": 1000.0,
        "process_peak": 2**20,
        "memory": {"parameters": 2 * 2**20, "unused": 0},
        "phases": {"forward": 0.03, "communication": 0.01} if step > first else {},
        "learning_rate": 0.1,
        "gradient_norm": 1.0 / step,
    }


def summary(rank: int) -> Line:
    """Of a rank r, which holds r + 1 MiB and makes r + 1 calls."""
    total = {"calls": rank + 1, "nbytes": 2**20 * (rank + 1), "wait_s": 0.25}
    small = {"calls": 1, "nbytes": 8, "wait_s": 0.0}
    return {
        "rank": rank,
        "pid": 1,
        "process_peak": 2**28,
        "memory": {"parameters": {"live": 4, "peak": 2**20 * (rank + 1)}, "unused": {"peak": 0}},
        "comm": {"all_reduce": total, "barrier": small},
        "groups": {"world": {"all_reduce": total, "barrier": small}},
        "phases": {"forward": 3.0, "communication": 1.0},
    }


def write_run(folder: Path, ranks: int, *, finished: bool = True) -> Path:
    """The folder of such a run."""
    folder.mkdir()
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for line in run_lines(ranks, finished=finished):
            writer.write(**line)
    return folder
