import json
from pathlib import Path
from typing import Any

import torch

import echelon as ec
from echelon import events
from echelon.observe import Trace
from echelon.observe.trace import write_trace


def record(ranks: int) -> list[list[dict[str, Any]]]:
    def main(world: ec.World) -> list[dict[str, Any]]:
        trace = Trace(world.rank)
        with events.listen(trace):
            events.emit("ddp.backward", rank=world.rank, phase="begin")
            world.group.all_reduce(torch.zeros(10), label="bucket 0")
            events.emit("memory", rank=world.rank, category="unit", nbytes=8)
            events.emit("ddp.backward", rank=world.rank, phase="end")
        return trace.rows

    return ec.run(main, ranks)


def test_a_rank_is_a_process_with_a_name(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", record(ranks=3))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {row["pid"]: row["args"]["name"] for row in rows if row["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    assert {row["pid"] for row in rows if row["ph"] == "X"} == {0, 1, 2}


def test_time_starts_at_zero_and_waits_lie_inside_the_backward(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", record(ranks=2))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [row for row in rows if row["ph"] == "X" and row["pid"] == 0]
    backward = next(row for row in spans if row["name"] == "backward")
    wait = next(row for row in spans if row["name"] == "wait all_reduce bucket 0")
    assert backward["ts"] <= wait["ts"]
    assert wait["ts"] + wait["dur"] <= backward["ts"] + backward["dur"] + 0.01
    assert min(row["ts"] for row in rows if "ts" in row) == 0


def test_memory_is_a_counter_of_all_categories() -> None:
    trace = Trace(rank=0)
    with events.listen(trace):
        events.emit("memory", rank=0, category="a", nbytes=5)
        events.emit("memory", rank=0, category="b", nbytes=1)
        events.emit("memory", rank=0, category="a", nbytes=-2)
    assert [row["args"] for row in trace.rows] == [{"a": 5}, {"a": 5, "b": 1}, {"a": 3, "b": 1}]


def test_rows_over_the_limit_are_counted_and_dropped() -> None:
    trace = Trace(rank=0, limit=2)
    with events.listen(trace):
        for _ in range(5):
            events.emit("memory", rank=0, category="a", nbytes=1)
    assert (len(trace.rows), trace.dropped) == (2, 3)
