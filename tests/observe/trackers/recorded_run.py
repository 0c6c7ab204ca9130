"""A small recorded run, and what a tracker must have of it.

Packages of trackers keep processes and threads until a process ends, so a test records in a child:
``python -m tests.observe.trackers.recorded_run FOLDER PER_RANK TRACKER ...``.
"""

import math
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import echelon as ec
from echelon.observe import Recorder, RunInfo, read_metrics, run_output
from tests.children import environ

STEPS = 4
RANKS = 2
SECRET = "s3cr3t-Value"
Values = dict[str, list[tuple[int, float]]]


def record(world: ec.World, folder: Path, trackers: list[str], per_rank: bool = False) -> None:
    """Record a run whose second loss is not finite, and whose ranks have other losses."""
    info = RunInfo(total_steps=STEPS, config={"lr": 0.1, "data": "a | b", "key": SECRET})
    with Recorder(world, folder, info, to=trackers, per_rank=per_rank) as recorder:
        for step in range(1, STEPS + 1):
            loss = math.nan if step == 2 else 1.0 / step + world.rank
            world.group.barrier()
            recorder.step(step, loss, num_tokens=8, learning_rate=0.1 / step)
        recorder.evaluation(STEPS, 0.7)


def recorded_in_child(
    folder: Path, *trackers: str, per_rank: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Record in another process; it must end well."""
    secret = [f"--token={SECRET}"]  # which no tracker may have
    command = [sys.executable, "-m", __name__, str(folder), str(per_rank), *trackers, *secret]
    result = subprocess.run(
        command, env=environ(**variables), capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "the tracker" not in result.stderr  # no warning
    for path in folder.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    return result


def values_in_metrics(folder: Path) -> Values:
    """The numbers of ``metrics.jsonl`` under the names that trackers promise."""
    values: Values = defaultdict(list)
    for line in read_metrics(folder):
        match line["kind"]:
            case "step":
                loss = math.nan if line["loss"] is None else line["loss"]
                values["train/loss"].append((line["step"], loss))
                for name, field in {
                    "perf/tokens_per_second": "tokens_per_s",
                    "perf/elapsed_seconds": "time_s",
                    "train/learning_rate": "learning_rate",
                    "memory/process_peak_bytes": "process_peak",
                }.items():
                    values[name].append((line["step"], line[field]))
            case "evaluation":
                values["validation/loss"].append((line["step"], line["loss"]))
            case "ranks":
                peak = max(rank["process_peak"] for rank in line["ranks"])
                values["memory/greatest_process_peak_bytes"].append((STEPS, peak))
                for field, name in {"calls": "calls", "wait_s": "wait_seconds"}.items():
                    most = max(rank["comm"]["barrier"][field] for rank in line["ranks"])
                    values[f"comm/barrier_{name}"].append((STEPS, most))
    return dict(values)


def assert_same(values: Values, expected: Values, rel: float = 0.0) -> None:
    """Each expected name has its numbers at its steps; a NaN equals a NaN."""
    for name, points in expected.items():
        assert [step for step, _ in values[name]] == [step for step, _ in points], name
        for (step, number), (_, wanted) in zip(values[name], points, strict=True):
            same = math.isclose(number, wanted, rel_tol=rel, abs_tol=0.0)
            assert same or (math.isnan(number) and math.isnan(wanted)), (name, step, number, wanted)


if __name__ == "__main__":
    run_output.write_report = lambda folder, live=False: None  # drawing takes a second
    place, of_each, *names, _ = sys.argv[1:]
    ec.run(record, RANKS, args=(Path(place), names, of_each == "True"))
