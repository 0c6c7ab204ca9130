"""All trackers of a run, and a finished run sent to them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, final

from torch import Tensor

from echelon import checks
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.observe.metrics import read_metrics
from echelon.observe.recorded_run import RecordedRun
from echelon.observe.trackers.known_trackers import TrackerChoice
from echelon.observe.trackers.tracked_values import tracked_config, tracked_values
from echelon.observe.trackers.tracker import TrackedRun, Tracker
from echelon.observe.trackers.tracker_thread import (
    CLOSE_AFTER_ERROR_S,
    CLOSE_S,
    TrackerThread,
)
from echelon.process.command_words import masked_value


@final
class Tracking:
    """The trackers of a run on this rank: none on ranks that do not track. A context manager.

    Each tracker works on a thread of its own. When it fails, or is slow for a minute, training goes
    on, and a warning says what happened.

    Args:
        threads: the trackers.
        remedy: a sentence for a warning, by the name of a tracker.
    """

    def __init__(self, threads: Sequence[TrackerThread], remedy: Mapping[str, str]) -> None:
        self._threads = list(threads)
        self._remedy = dict(remedy)
        self._warn()

    @property
    def is_active(self) -> bool:
        """Whether this rank has trackers."""
        return bool(self._threads)

    def config(self, values: Mapping[str, object]) -> None:
        """Send the options of the run to all trackers; texts that are secrets go as ``***``."""
        checks.mapping("values", values)
        shown = {name: masked_value(name, value) for name, value in values.items()}
        for thread in self._threads:
            thread.put(partial(_send_config, shown))
        self._warn()

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send numbers by flat names such as ``train/loss``, after ``step`` steps.

        Example:
            >>> # tracking.log({"train/loss": loss.item(), "train/accuracy": 0.5}, step)
        """
        checks.mapping("values", values)
        step = checks.integer("step", step)
        numbers = {name: _number(name, value) for name, value in values.items()}
        for thread in self._threads:
            thread.put(partial(_send_values, numbers, step))
        self._warn()

    def close(self) -> None:
        """Wait until all trackers have stored everything. A second call does nothing."""
        self._close(CLOSE_S)

    def _close(self, close_s: float) -> None:
        threads, self._threads = self._threads, []
        for thread in threads:
            thread.close(close_s)
        self._warn(threads)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # Other ranks wait to hear of an error.
        self._close(CLOSE_S if error is None else CLOSE_AFTER_ERROR_S)

    def _warn(self, threads: Sequence[TrackerThread] | None = None) -> None:
        for thread in self._threads if threads is None else threads:
            if (trouble := thread.trouble()) is not None:
                remedy = self._remedy.get(thread.name, "")
                warnings.warn(
                    f"the tracker {thread.name} {trouble}. Training goes on.{remedy}", stacklevel=3
                )


def _send_config(values: Mapping[str, object], tracker: Tracker) -> None:
    tracker.config(values)


def _send_values(values: Mapping[str, float], step: int, tracker: Tracker) -> None:
    tracker.log(values, step)


def _number(name: str, value: object) -> float:
    if isinstance(value, Tensor):
        value = value.detach()  # a loss has a graph
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"the value {name!r} is {value!r:.80}; give a number") from error


def track(
    world: World,
    folder: str | os.PathLike[str],
    *trackers: str | Tracker,
    config: Mapping[str, object] | None = None,
    per_rank: bool = False,
) -> Tracking:
    """Open trackers for a run. A ``Recorder`` does this itself.

    Args:
        folder: of the run; its last name is the name of the run.
        trackers: ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``, ``prometheus`` or
            ``prometheus-http``, each with ``=PLACE`` where not its default is meant; or objects of
            yours with the methods of ``Tracker``.
        config: the options of the run.
        per_rank: track each rank as a run of its own, instead of rank 0 alone. All ranks then
            call it together.

    Raises:
        ArgumentError: there is no such tracker, or its package is not installed.

    Example:
        >>> # with ec.observe.track(world, "runs/gpt", "wandb", config=vars(args)) as tracking:
        >>> #     tracking.log({"train/loss": loss.item()}, step)
    """
    checks.instance("world", world, World)
    checks.path("folder", folder)
    checks.flag("per_rank", per_rank)
    tracking = open_trackers(world, Path(folder), chosen_trackers(trackers), per_rank)
    if config is not None:
        tracking.config(config)
    return tracking


def open_trackers(
    world: World,
    folder: Path,
    chosen: Sequence[TrackerChoice | Tracker],
    per_rank: bool,
    remedy: str = "",
) -> Tracking:
    """The trackers that this rank writes to.

    Args:
        remedy: a sentence for a warning, with ``{name}`` for the tracker.
    """
    if world.is_replay or not (per_rank or world.rank == 0):
        return Tracking([], {})
    run = TrackedRun(folder=folder, name=folder.name, rank=world.rank if per_rank else None)
    if run.rank:
        world.group.barrier()  # rank 0 makes the project, which others would make at the same time
    threads = [
        TrackerThread(choice.name, partial(choice.open, run))
        if isinstance(choice, TrackerChoice)
        else TrackerThread(type(choice).__name__, partial(_as_it_is, choice))
        for choice in chosen
    ]
    if run.rank == 0:
        world.group.barrier()
    names = [choice.name for choice in chosen if isinstance(choice, TrackerChoice)]
    can_be_sent = [name for name in names if not name.startswith("prometheus")]
    return Tracking(threads, {name: remedy.format(name=name) for name in can_be_sent})


def chosen_trackers(trackers: Sequence[str | Tracker]) -> list[TrackerChoice | Tracker]:
    """The trackers that texts name; objects that are trackers stay as they are.

    Raises:
        ArgumentError: there is no such tracker, or its package is not installed.
    """
    if isinstance(trackers, str) or not isinstance(trackers, Sequence):
        raise ArgumentError(f"the trackers are {trackers!r:.80}; give a list of names")
    return [
        tracker
        if not isinstance(tracker, str) and isinstance(tracker, Tracker)
        else TrackerChoice.parse(tracker)
        for tracker in trackers
    ]


def _as_it_is(tracker: Tracker) -> Tracker:
    return tracker


def send_run(folder: str | os.PathLike[str], *trackers: str) -> int:
    """Send a run to trackers from its ``metrics.jsonl``, with the values that they get live.

    Args:
        folder: of the run.
        trackers: names, as those of ``track``.

    Returns:
        The number of steps that were sent.

    Raises:
        ArgumentError: there is no such run or tracker, its package is not installed, or it shows
            only what runs now.
        Exception: what the tracker raises.
    """
    choices = [TrackerChoice.parse(tracker) for tracker in trackers]
    for choice in choices:
        if choice.name.startswith("prometheus"):
            raise ArgumentError(
                f"{choice.name} shows the newest values of a run that goes on; send a finished run "
                "to tensorboard, wandb, mlflow or trackio"
            )
    recorded = RecordedRun.of(read_metrics(folder), str(Path(folder) / "metrics.jsonl"))
    run = TrackedRun(folder=Path(folder), name=recorded.name)
    for choice in choices:
        _send(choice.open(run), recorded)
    return len(recorded.kept)


def _send(tracker: Tracker, recorded: RecordedRun) -> None:
    tracker.config(tracked_config(recorded.start))
    # Trackers refuse steps that go back, as those of a job that was restarted do.
    for line in sorted([*recorded.kept, *recorded.evaluations], key=lambda line: line["step"]):
        tracker.log(tracked_values(line), line["step"])
    if recorded.ranks:
        last_step = recorded.kept[-1]["step"] if recorded.kept else 0
        tracker.log(tracked_values({"kind": "ranks", "ranks": recorded.ranks}), last_step)
    tracker.close()
