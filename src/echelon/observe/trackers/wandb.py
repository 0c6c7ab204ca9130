"""Weights & Biases, online or with ``WANDB_MODE=offline``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import final

from echelon.observe.trackers.tracker import TrackedRun
from echelon.process.command_words import masked


@final
class WandbTracker:
    """A run of W&B. Its own environment variables hold, such as ``WANDB_MODE``.

    W&B stores the command line by itself, with the host and the commit. Where the command line has
    a secret, it is told to store none of these.

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
            settings=wandb.Settings(x_disable_meta=_has_secrets(sys.argv)),
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


def _has_secrets(words: Sequence[str]) -> bool:
    return masked(words) != tuple(words)
