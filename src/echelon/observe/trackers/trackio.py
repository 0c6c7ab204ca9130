"""Trackio: runs in a database on this machine, or in a Space of Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import final

from echelon.observe.trackers.tracker import TrackedRun


@final
class TrackioTracker:
    """A run of Trackio. Its own environment variables hold, such as ``TRACKIO_DIR``.

    Args:
        place: the project; None: that of ``TRACKIO_PROJECT``, or ``echelon``.
    """

    def __init__(self, run: TrackedRun, place: str | None) -> None:
        import trackio

        self._run = trackio.init(
            project=place or os.environ.get("TRACKIO_PROJECT", "echelon"),
            name=run.title,
            group=None if run.rank is None else run.name,
            embed=False,
        )

    def config(self, values: Mapping[str, object]) -> None:
        """Store the options."""
        self._run.config.update(values)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Store numbers."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run, which writes what is left."""
        self._run.finish()
