"""MLflow: a server, or a store on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, final

from echelon.observe.trackers.tracker import TrackedRun

_MOST_PARAMS = 100  # of one request; of metrics, MLflow takes 1000


@final
class MlflowTracker:
    """A run of MLflow. Its own environment variables hold, such as ``MLFLOW_EXPERIMENT_NAME``.

    Args:
        place: the tracking URI; None: that of ``MLFLOW_TRACKING_URI``, or MLflow's default.
    """

    def __init__(self, run: TrackedRun, place: str | None) -> None:
        from mlflow import entities
        from mlflow.tracking import MlflowClient

        self._entities: Any = entities
        self._client = MlflowClient(tracking_uri=place)
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", "echelon")
        existing = self._client.get_experiment_by_name(experiment)
        number = existing.experiment_id if existing else self._client.create_experiment(experiment)
        tags = {} if run.rank is None else {"group": run.name, "rank": str(run.rank)}
        created = self._client.create_run(number, run_name=run.title, tags=tags)
        self._id = created.info.run_id

    def config(self, values: Mapping[str, object]) -> None:
        """Store the options as parameters of the run."""
        params = [self._entities.Param(name, str(value)) for name, value in values.items()]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + _MOST_PARAMS])

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Store numbers."""
        now_ms = int(time.time() * 1000)
        metrics = [
            self._entities.Metric(name, value, now_ms, step) for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._id)
