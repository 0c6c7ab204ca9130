"""The trackers that have a name."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from echelon import checks
from echelon.errors import ArgumentError
from echelon.observe.trackers.prometheus_endpoint import address
from echelon.observe.trackers.tracker import TrackedRun, Tracker

_ROOM = "echelon.observe.trackers"


@dataclass(frozen=True)
class KnownTracker:
    """A tracker of this library.

    Attributes:
        home: its module and class.
        package: what must be importable.
        wheel: what provides it.
    """

    home: tuple[str, str]
    package: str | None = None
    wheel: str | None = None


KNOWN_TRACKERS = {
    "tensorboard": KnownTracker(("tensorboard", "TensorBoardTracker"), "tensorboard"),
    "wandb": KnownTracker(("wandb", "WandbTracker"), "wandb"),
    "mlflow": KnownTracker(("mlflow", "MlflowTracker"), "mlflow", "mlflow-skinny"),
    "trackio": KnownTracker(("trackio", "TrackioTracker"), "trackio"),
    "prometheus": KnownTracker(("prometheus", "PrometheusFile")),
    "prometheus-http": KnownTracker(("prometheus_endpoint", "PrometheusEndpoint")),
}


@dataclass(frozen=True)
class TrackerChoice:
    """A known tracker, and where it keeps its runs.

    Attributes:
        name: one of ``KNOWN_TRACKERS``.
        place: what its class says; None for its default.
    """

    name: str
    place: str | None = None

    @classmethod
    def parse(cls, text: str) -> TrackerChoice:
        """Read ``NAME`` or ``NAME=PLACE``.

        Raises:
            ArgumentError: there is no such tracker, its package is not installed, or the place
                cannot be one.

        Example:
            >>> TrackerChoice.parse("prometheus=/tmp/gpt.prom")
            TrackerChoice(name='prometheus', place='/tmp/gpt.prom')
        """
        checks.instance("the tracker", text, str)
        name, _, place = text.partition("=")
        if name not in KNOWN_TRACKERS:
            raise ArgumentError(
                f"there is no tracker {name!r:.80}; use one of {', '.join(KNOWN_TRACKERS)}, or an "
                "object with the methods config, log and close"
            )
        known = KNOWN_TRACKERS[name]
        if known.package is not None and importlib.util.find_spec(known.package) is None:
            raise ArgumentError(
                f"the tracker {name!r} needs a package that is not installed. Install all trackers "
                f"with: pip install 'echelon[trackers]', or this one with: "
                f"pip install {known.wheel or known.package}"
            )
        if name == "prometheus-http":
            address(place or None)
        return cls(name, place or None)

    def open(self, run: TrackedRun) -> Tracker:
        """Make the tracker."""
        module, class_name = KNOWN_TRACKERS[self.name].home
        kind = getattr(importlib.import_module(f"{_ROOM}.{module}"), class_name)
        tracker: Tracker = kind(run, self.place)
        return tracker
