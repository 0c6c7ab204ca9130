"""TensorBoard: event files that its own page shows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import final

from echelon.observe.trackers.tracker import TrackedRun


@final
class TensorBoardTracker:
    """Writes event files.

    Args:
        place: a folder in which this run gets its own; None: the event files are in
            ``tensorboard`` in the folder of the run. Each rank has its own folder if each is
            tracked.
    """

    def __init__(self, run: TrackedRun, place: str | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard" if place is None else Path(place) / run.name
        if run.rank is not None:
            folder /= f"rank-{run.rank}"
        # Event files of one folder are one run on TensorBoard's page.
        used = (folder.with_name(f"{folder.name}-{trial}") for trial in count(2))
        while folder.exists():
            folder = next(used)
        self._writer = SummaryWriter(str(folder))

    def config(self, values: Mapping[str, object]) -> None:
        """Write the options as a table."""
        cells = {name: str(value).replace("|", r"\|") for name, value in values.items()}
        rows = "\n".join(f"| {name} | {text} |" for name, text in cells.items())
        self._writer.add_text("config", f"| option | value |\n|---|---|\n{rows}", 0)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers, which event files hold as float32."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and close the file."""
        self._writer.close()
