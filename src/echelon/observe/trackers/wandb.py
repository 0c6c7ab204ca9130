"""Weights & Biases, online or with ``WANDB_MODE=offline``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from echelon.observe.trackers.tracker import TrackedRun


@final
class WandbTracker:
    """A run of W&B. Its own environment variables hold, such as ``WANDB_MODE``.

    Args:
        place: the project; None: that of ``WANDB_PROJECT``, or ``echelon``.
    """

    def __init__(self, run: TrackedRun, place: str | None) -> None:
        import wandb

        self._run = wandb.init(
            project=place or os.environ.get("WANDB_PROJECT", "echelon"),
            name=run.title,
            group=None if run.rank is None else run.name,
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            reinit="create_new",  # simulated ranks are several runs of one process
        )

    def config(self, values: Mapping[str, object]) -> None:
        """Store the options."""
        self._run.config.update(dict(values))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Store numbers; W&B refuses steps that go back."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run, which uploads what is left."""
        self._run.finish()
