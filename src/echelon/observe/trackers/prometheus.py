"""The text format of Prometheus: the newest values of a run in a file, for the node exporter.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/, "Text-based format".
"""

from __future__ import annotations

import math
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import final

from echelon.errors import ArgumentError
from echelon.observe.trackers.tracker import TrackedRun
from echelon.process.atomic_files import remove_file, replace_file
from echelon.process.plain_file import open_plain

_FIRST = b"# TYPE echelon_"  # how every file of ours begins
_FOREIGN = re.compile(r"[^a-zA-Z0-9_]")


class PrometheusValues:
    """The newest values of a run, as gauges in the text format.

    Example:
        >>> values = PrometheusValues(TrackedRun(folder=Path("runs/gpt"), name="gpt"))
        >>> values.update({"train/loss": 2.5}, step=7, now_s=1000.0)
        >>> print(values.text())
        # TYPE echelon_train_loss gauge
        echelon_train_loss{run="gpt"} 2.5
        # TYPE echelon_step gauge
        echelon_step{run="gpt"} 7
        # TYPE echelon_last_step_timestamp_seconds gauge
        echelon_last_step_timestamp_seconds{run="gpt"} 1000.0
        <BLANKLINE>
    """

    def __init__(self, run: TrackedRun) -> None:
        labels = {"run": run.name} | ({} if run.rank is None else {"rank": str(run.rank)})
        self._labels = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        self._values: dict[str, float] = {}

    def update(self, values: Mapping[str, float], step: int, now_s: float) -> None:
        """Take newer values; those of other names stay."""
        self._values.update(values)
        self._values["step"] = step
        # Tells a job that hangs from one that runs.
        self._values["last_step_timestamp_seconds"] = now_s

    def text(self) -> str:
        """All values, one sample of each."""
        samples = {_FOREIGN.sub("_", name): value for name, value in self._values.items()}
        return "".join(
            f"# TYPE echelon_{name} gauge\nechelon_{name}{{{self._labels}}} {_number_text(value)}\n"
            for name, value in samples.items()
        )


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number_text(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


@final
class PrometheusFile:
    """Writes the newest values into a file, which is whole whenever somebody reads it.

    The file goes when the run ends; that of a run that was killed stays, and its time stamp grows
    old.

    Args:
        place: the file, such as one in the textfile folder of the node exporter; None:
            ``metrics.prom`` in the folder of the run. Each rank has its own beside it if each is
            tracked.

    Raises:
        ArgumentError: a file is there that such a run has not written. Such a file stays.
    """

    def __init__(self, run: TrackedRun, place: str | None) -> None:
        path = run.folder / "metrics.prom" if place is None else Path(place)
        if run.rank is not None:
            path = path.with_name(f"{path.stem}-rank-{run.rank}{path.suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        _refuse_foreign(path)
        self._path = path
        self._values = PrometheusValues(run)

    def config(self, values: Mapping[str, object]) -> None:
        """Take nothing: options are no numbers that change."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Replace the file.

        Raises:
            ArgumentError: somebody has put another file there meanwhile.
        """
        _refuse_foreign(self._path)
        self._values.update(values, step, time.time())
        # The node exporter reads *.prom, so it does not see the file before it has this name.
        replace_file(self._path, self._values.text().encode(), sync=False)

    def close(self) -> None:
        """Remove the file, so that nobody takes its values for those of a run."""
        if _is_ours(self._path):
            remove_file(self._path)


def _is_ours(path: Path) -> bool:
    """Whether there is a file that this tracker has written, in this run or in one before."""
    try:
        with open_plain(path, sys.maxsize) as file:
            return file.read(len(_FIRST)) == _FIRST
    except OSError:  # nothing, or what such a run does not leave: a link, a pipe, a locked file
        return False


def _refuse_foreign(path: Path) -> None:
    """Refuse what is there unless it is ours."""
    if os.path.lexists(path) and not _is_ours(path):
        raise ArgumentError(
            f"the tracker prometheus does not write to {path}, because something is there that it "
            "has not written: name another file, or remove that one yourself"
        )
