import math
import threading
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.observe import MetricsWriter, Recorder, RunInfo, read_metrics, send_run, track
from tests.observe.trackers.recorded_run import RANKS, STEPS, record


class NotingTracker:
    """Keeps what it gets; ``error`` is raised from the given step on."""

    def __init__(self, error_at: int | None = None) -> None:
        self.options: dict[str, object] = {}
        self.steps: list[tuple[int, dict[str, float]]] = []
        self.closed = 0
        self._error_at = error_at

    def config(self, values: Mapping[str, object]) -> None:
        self.options.update(values)

    def log(self, values: Mapping[str, float], step: int) -> None:
        if self._error_at is not None and step >= self._error_at:
            raise ConnectionError("the server is away")
        self.steps.append((step, dict(values)))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.observe.run_output.write_report", lambda folder, live=False: None)


@pytest.mark.parametrize("per_rank", [False, True])
def test_rank_0_alone_tracks_unless_each_rank_is_asked_for(tmp_path: Path, per_rank: bool) -> None:
    trackers = [NotingTracker() for _ in range(3)]

    def main(world: ec.World) -> None:
        tracker = trackers[world.rank]
        options = {"lr": 0.1}
        with track(world, tmp_path, tracker, config=options, per_rank=per_rank) as tracking:
            tracking.log({"train/loss": torch.tensor(float(world.rank))}, 1)

    ec.run(main, 3)
    tracked = [tracker for tracker in trackers if tracker.steps]
    assert tracked == (trackers if per_rank else trackers[:1])
    for rank, tracker in enumerate(tracked):
        assert tracker.steps == [(1, {"train/loss": float(rank)})]
        assert (tracker.options, tracker.closed) == ({"lr": 0.1}, 1)


def test_a_recorder_of_each_rank_sends_the_numbers_of_this_rank(tmp_path: Path) -> None:
    trackers = [NotingTracker() for _ in range(2)]

    def main(world: ec.World) -> None:
        info = RunInfo(total_steps=1, config={"lr": 0.1})
        with Recorder(world, tmp_path, info, to=[trackers[world.rank]], per_rank=True) as recorder:
            recorder.memory.measure({"parameters": 100 + world.rank})
            recorder.step(1, float(world.rank), num_tokens=8)

    ec.run(main, 2)
    for rank, tracker in enumerate(trackers):
        assert tracker.options["lr"] == 0.1
        (step, values), (last_step, totals) = tracker.steps
        assert (step, values["train/loss"]) == (1, rank)
        assert (last_step, totals["memory/parameters_peak_bytes"]) == (1, 100 + rank)


def test_a_tracker_that_fails_is_said_and_ends_no_training(tmp_path: Path) -> None:
    failing, healthy = NotingTracker(error_at=2), NotingTracker()

    def main(world: ec.World) -> None:
        record(world, tmp_path / "run", [failing, healthy])  # type: ignore[list-item]

    with pytest.warns(UserWarning, match="the tracker NotingTracker failed: ConnectionError: the"):
        ec.run(main, RANKS)
    assert [step for step, _ in failing.steps] == [1]
    assert failing.closed == 0
    assert [step for step, _ in healthy.steps] == [1, 2, 3, 4, 4, 4]
    assert [line["kind"] for line in read_metrics(tmp_path / "run")].count("step") == STEPS


def test_the_warning_says_how_the_values_get_there_after_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("importlib.util.find_spec", lambda package: package)
    monkeypatch.setattr("echelon.observe.trackers.known_trackers.TrackerChoice.open", fail)
    with pytest.warns(
        UserWarning, match=r"failed: OSError: no space left. Training goes on. "
    ) as w:
        ec.run(record, RANKS, args=(tmp_path / "run", ["mlflow=http://nowhere.invalid"]))
    assert str(w[0].message).endswith(
        f"metrics.jsonl has all numbers; send them again with: "
        f"echelon report --to mlflow {tmp_path / 'run'}"
    )


def test_a_tracker_that_is_unknown_is_refused_on_all_ranks_before_a_folder_is_made(
    tmp_path: Path,
) -> None:
    with pytest.raises(ec.ArgumentError, match="there is no tracker 'comet'"):
        ec.run(record, RANKS, args=(tmp_path / "run", ["comet"]))
    assert not (tmp_path / "run").exists()

    def main(world: ec.World) -> None:
        with pytest.raises(ec.ArgumentError, match="there is no tracker 'comet'"):
            track(world, tmp_path, "comet")

    ec.run(main, RANKS)


def test_a_name_in_place_of_a_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ec.ArgumentError, match="give a list of names"):
        ec.run(record, 1, args=(tmp_path / "run", "tensorboard"))


@pytest.mark.parametrize("value", ["high", None, torch.zeros(2)])
def test_a_value_that_is_no_number_is_refused(tmp_path: Path, value: object) -> None:
    def main(world: ec.World) -> None:
        with (
            track(world, tmp_path, NotingTracker()) as tracking,
            pytest.raises(ec.ArgumentError, match=r"the value 'a' is .*; give a number"),
        ):
            tracking.log({"a": value}, 1)  # type: ignore[dict-item]

    ec.run(main, 1)


def test_an_error_of_the_training_waits_for_no_tracker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echelon.observe.trackers.tracking.CLOSE_AFTER_ERROR_S", 0.01)
    go = threading.Event()

    class Slow(NotingTracker):
        def close(self) -> None:
            go.wait(60)

    def main(world: ec.World) -> None:
        with track(world, tmp_path, Slow()):
            raise KeyError("boom")

    with (
        pytest.warns(UserWarning, match="the tracker Slow has not stored everything within 0.01"),
        pytest.raises(KeyError, match="boom"),
    ):
        ec.run(main, 1)
    go.set()


def test_nothing_is_tracked_in_a_replay_and_a_second_close_does_nothing(tmp_path: Path) -> None:
    tracker = NotingTracker()

    def main(world: ec.World) -> None:
        tracking = track(world, tmp_path, tracker)
        tracking.close()
        tracking.close()
        tracking.log({"a": 1.0}, 1)
        assert tracker.closed == 1
        world.is_replay = True
        with track(world, tmp_path, tracker) as tracking:
            tracking.log({"a": 1.0}, 1)

    ec.run(main, 1)
    assert tracker.steps == []


def test_a_run_is_sent_with_its_numbers_at_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, sent = NotingTracker(), NotingTracker()

    def main(world: ec.World) -> None:
        record(world, tmp_path / "run", [live])  # type: ignore[list-item]

    ec.run(main, RANKS)
    monkeypatch.setattr(
        "echelon.observe.trackers.known_trackers.TrackerChoice.open", lambda self, run: sent
    )
    pytest.importorskip("tensorboard", reason="the extra 'trackers' is not installed")
    assert send_run(tmp_path / "run", "tensorboard") == STEPS
    assert [step for step, _ in sent.steps] == [step for step, _ in live.steps]
    for (_, values), (_, expected) in zip(sent.steps, live.steps, strict=True):
        assert values.keys() == expected.keys()
        assert all(
            values[name] == number or math.isnan(number) for name, number in expected.items()
        )
    assert sent.options == live.options
    assert sent.closed == 1


def test_of_a_step_that_was_made_again_the_last_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = {"version": 1, "name": "a", "time": "", "backend": "shm", "device": "cpu", "unit": ""}
    start |= {"ranks": 1, "total_steps": 3, "references": {}, "config": {}}
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        for attempt, steps in enumerate(((1, 2), (2, 3))):
            writer.write("start", **start, attempt=attempt, unix_s=100.0 * attempt)
            for step in steps:
                writer.write("step", step=step, time_s=1.0, loss=step + attempt, tokens_per_s=1.0)
    sent = NotingTracker()
    monkeypatch.setattr(
        "echelon.observe.trackers.known_trackers.TrackerChoice.open", lambda self, run: sent
    )
    pytest.importorskip("tensorboard", reason="the extra 'trackers' is not installed")
    assert send_run(tmp_path, "tensorboard") == 3
    assert [(step, values["train/loss"]) for step, values in sent.steps] == [(1, 1), (2, 3), (3, 4)]
    assert [values["perf/elapsed_seconds"] for _, values in sent.steps] == [1.0, 101.0, 101.0]


@pytest.mark.parametrize("name", ["prometheus", "prometheus-http"])
def test_a_finished_run_is_not_sent_to_what_shows_running_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(ec.ArgumentError, match="shows the newest values of a run that goes on"):
        send_run(tmp_path, name)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path / "metrics.jsonl") as writer:
        writer.write("note", title="a", text="b")
    with pytest.raises(ec.ArgumentError, match="has no 'start' line"):
        send_run(tmp_path)


def test_a_healthy_run_warns_of_nothing(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ec.run(record, RANKS, args=(tmp_path / "run", [NotingTracker()]))
