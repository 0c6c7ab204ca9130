import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

import echelon as ec
from echelon import events
from echelon.observe import Trace, merge_traces
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


def test_overlapping_calls_of_a_group_nest_in_lanes_named_after_it(tmp_path: Path) -> None:
    def main(world: ec.World) -> list[dict[str, Any]]:
        trace = Trace(world.rank)
        with events.listen(trace):
            works = [world.group.all_reduce(torch.zeros(10), async_op=True) for _ in range(3)]
            for work in works:
                assert work is not None
                work.wait()
        return trace.rows

    write_trace(tmp_path / "trace.json", ec.run(main, 2))
    rows = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    lanes = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    calls = [row for row in rows if row["name"] == "all_reduce" and row["pid"] == 0]
    assert len(calls) == 3
    assert sorted(lanes[row["tid"]] for row in calls) == [
        "group world",
        "group world (2)",
        "group world (3)",
    ]


def test_a_merged_timeline_has_the_spans_of_both_at_the_same_time(tmp_path: Path) -> None:
    def main(world: ec.World) -> list[dict[str, Any]]:
        trace = Trace(world.rank)
        with events.listen(trace), profile() as profiler:
            world.group.all_reduce(torch.zeros(10))
        profiler.export_chrome_trace(str(tmp_path / "profile.json"))
        return trace.rows

    write_trace(tmp_path / "trace.json", ec.run(main, 1))
    merge_traces(tmp_path / "trace.json", [tmp_path / "profile.json"], tmp_path / "merged.json")
    rows = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    (call,) = [row for row in rows if row["name"] == "all_reduce" and row["ph"] == "X"]
    (span,) = [row for row in rows if row["name"] == "echelon:all_reduce"]
    assert abs(call["ts"] - span["ts"]) < 50_000  # µs: clocks are read at different moments
    assert call["pid"] != span["pid"]


def test_profiles_of_ranks_that_take_turns_merge_into_a_lane_for_each_rank(tmp_path: Path) -> None:
    paths = [tmp_path / f"profile{rank}.json" for rank in range(3)]

    def main(world: ec.World) -> list[dict[str, Any]]:
        trace = Trace(world.rank)
        with events.listen(trace), profile() as profiler:
            world.group.all_reduce(torch.zeros(10))
            time.sleep(0.02)
            world.group.barrier()
        profiler.export_chrome_trace(str(paths[world.rank]))
        return trace.rows

    write_trace(tmp_path / "trace.json", ec.run(main, 3))
    merge_traces(tmp_path / "trace.json", paths, tmp_path / "merged.json")
    rows = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    of_profiles = {row["pid"] for row in rows if row["name"] == "echelon:all_reduce"}
    (process,) = of_profiles
    lanes = {
        row["tid"]: row["args"]["name"]
        for row in rows
        if row["name"] == "thread_name" and row["pid"] == process
    }
    assert sorted(lanes.values()) == ["rank 0", "rank 1", "rank 2"]
    for operation in ("all_reduce", "barrier"):
        calls = {
            f"rank {row['pid'] % (1 << 24)}": row["ts"]
            for row in rows
            if row["name"] == operation and row["ph"] == "X"
        }
        spans = {
            lanes[row["tid"]]: row["ts"] for row in rows if row["name"] == f"echelon:{operation}"
        }
        assert calls.keys() == spans.keys() == set(lanes.values())
        for lane, start in calls.items():
            assert abs(start - spans[lane]) < 10_000, (operation, lane)


def test_a_file_that_is_no_timeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("[]")
    with pytest.raises(ec.errors.ArgumentError, match="export_chrome_trace"):
        merge_traces(tmp_path / "trace.json", [], tmp_path / "merged.json")
