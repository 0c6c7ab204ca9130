from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.observe.trackers.recorded_run import (
    RANKS,
    assert_same,
    recorded_in_child,
    values_in_metrics,
)

# Found, not imported: every worker collects this file, and the import takes a second.
pytestmark = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="the extra 'trackers' is not installed"
)

# MLflow without a database keeps runs in files only if it is told to.
LOCAL = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}


@pytest.fixture(autouse=True)
def files_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LOCAL.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
def test_a_store_of_files_has_what_metrics_jsonl_has(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    place = (tmp_path / "mlruns").as_uri()
    recorded_in_child(tmp_path / "run", f"mlflow={place}", MLFLOW_EXPERIMENT_NAME="tests")
    client = MlflowClient(place)
    (run,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    expected = values_in_metrics(tmp_path / "run")
    values = {
        name: [
            (point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)
        ]
        for name in expected
    }
    assert_same(values, expected)
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert (run.data.params["lr"], run.data.params["ranks"]) == ("0.1", str(RANKS))


@pytest.mark.slow
def test_each_rank_is_a_run_of_a_group_if_each_is_tracked(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    place = (tmp_path / "mlruns").as_uri()
    recorded_in_child(tmp_path / "run", f"mlflow={place}", per_rank=True)
    client = MlflowClient(place)
    runs = client.search_runs([client.get_experiment_by_name("echelon").experiment_id])
    assert {run.data.tags["group"] for run in runs} == {"run"}
    assert {run.data.tags["rank"]: run.data.metrics["train/loss"] for run in runs} == {
        "0": 0.25,
        "1": 1.25,
    }


@pytest.mark.slow
def test_more_options_than_a_request_takes_are_all_stored(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    from echelon.observe.trackers.mlflow import MlflowTracker
    from echelon.observe.trackers.tracker import TrackedRun

    place = (tmp_path / "mlruns").as_uri()
    tracker = MlflowTracker(TrackedRun(folder=tmp_path, name="many"), place)
    tracker.config({f"option {number}": number for number in range(250)})
    tracker.close()
    client = MlflowClient(place)
    (run,) = client.search_runs([client.get_experiment_by_name("echelon").experiment_id])
    assert len(run.data.params) == 250
