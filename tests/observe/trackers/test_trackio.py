import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.children import environ
from tests.observe.trackers.recorded_run import assert_same, recorded_in_child, values_in_metrics

# Found, not imported: every worker collects this file, and the import takes a second.
pytestmark = pytest.mark.skipif(
    find_spec("trackio") is None, reason="the extra 'trackers' is not installed"
)

# Trackio reads TRACKIO_DIR when it is imported.
READ = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
project = sys.argv[1]
runs = SQLiteStorage.get_runs(project)
names = [run["name"] if isinstance(run, dict) else run for run in runs]
print(json.dumps({
    name: {
        "logs": SQLiteStorage.get_logs(project, name),
        "config": SQLiteStorage.get_run_config(project, name),
    }
    for name in names
}))
"""


def read(folder: Path, project: str) -> dict[str, dict[str, object]]:
    """All runs of a project, by Trackio's own storage."""
    result = subprocess.run(
        [sys.executable, "-c", READ, project],
        env=environ(TRACKIO_DIR=str(folder)),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    runs: dict[str, dict[str, object]] = json.loads(result.stdout.splitlines()[-1])
    return runs


@pytest.mark.slow
def test_the_database_has_what_metrics_jsonl_has(tmp_path: Path) -> None:
    recorded_in_child(tmp_path / "run", "trackio=tests", TRACKIO_DIR=str(tmp_path / "db"))
    run = read(tmp_path / "db", "tests")["run"]
    expected = values_in_metrics(tmp_path / "run")
    values = {
        name: [(log["step"], float(log[name])) for log in run["logs"] if name in log]
        for name in expected
    }
    assert_same(values, expected)
    assert run["config"]["lr"] == 0.1


@pytest.mark.slow
def test_each_rank_is_a_run_if_each_is_tracked(tmp_path: Path) -> None:
    db = str(tmp_path / "db")
    recorded_in_child(tmp_path / "run", "trackio", per_rank=True, TRACKIO_DIR=db)
    runs = read(tmp_path / "db", "echelon")
    losses = {
        name: [log["train/loss"] for log in run["logs"] if "train/loss" in log][-1]
        for name, run in runs.items()
    }
    assert losses == {"run-rank-0": 0.25, "run-rank-1": 1.25}
