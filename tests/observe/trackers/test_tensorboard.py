import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tensorboard", reason="the extra 'trackers' is not installed")

import echelon as ec
from echelon.observe import send_run
from echelon.observe.trackers.tensorboard import TensorBoardTracker
from echelon.observe.trackers.tracker import TrackedRun
from tests.children import environ
from tests.observe.trackers.recorded_run import (
    RANKS,
    STEPS,
    Values,
    assert_same,
    record,
    values_in_metrics,
)

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
FLOAT32 = 2**-23  # event files hold numbers as float32


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echelon.observe.run_output.write_report", lambda folder, live=False: None)


def read(folder: Path) -> tuple[Values, str]:
    """The scalars of a folder, by TensorBoard's own reader, and the text of the options."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    values = {
        name: [(point.step, point.value) for point in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    (text,) = (event.tensor_proto.string_val[0] for event in events.Tensors("config/text_summary"))
    return values, text.decode()


def test_event_files_have_what_metrics_jsonl_has(tmp_path: Path) -> None:
    ec.run(record, RANKS, args=(tmp_path / "run", ["tensorboard"]))
    values, text = read(tmp_path / "run" / "tensorboard")
    expected = values_in_metrics(tmp_path / "run")
    assert expected.keys() <= values.keys()
    assert_same(values, expected, rel=FLOAT32)
    assert "| lr | 0.1 |" in text
    assert "| ranks | 2 |" in text


def test_a_finished_run_is_sent_with_the_values_that_a_running_one_sends(tmp_path: Path) -> None:
    ec.run(record, RANKS, args=(tmp_path / "run", ["tensorboard"]))
    assert send_run(tmp_path / "run", f"tensorboard={tmp_path / 'logs'}") == STEPS
    live, live_text = read(tmp_path / "run" / "tensorboard")
    sent, sent_text = read(tmp_path / "logs" / "run")
    assert live.keys() == sent.keys()
    assert_same(sent, live)
    assert live_text == sent_text


def test_each_rank_has_a_folder_if_each_is_tracked(tmp_path: Path) -> None:
    ec.run(record, RANKS, args=(tmp_path / "run", ["tensorboard"], True))
    losses = {
        rank: read(tmp_path / "run" / "tensorboard" / f"rank-{rank}")[0]["train/loss"]
        for rank in range(RANKS)
    }
    assert losses[0][2] == (3, pytest.approx(1 / 3))
    assert losses[1][2] == (3, pytest.approx(1 / 3 + 1))


def test_a_second_run_in_a_place_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    run = TrackedRun(folder=tmp_path, name="gpt")
    for value in (1.0, 2.0):
        tracker = TensorBoardTracker(run, str(tmp_path / "logs"))
        tracker.config({})
        tracker.log({"train/loss": value}, 1)
        tracker.close()
    assert read(tmp_path / "logs" / "gpt")[0] == {"train/loss": [(1, 1.0)]}
    assert read(tmp_path / "logs" / "gpt-2")[0] == {"train/loss": [(1, 2.0)]}


def test_a_bar_in_an_option_stays_in_its_cell(tmp_path: Path) -> None:
    ec.run(record, 1, args=(tmp_path / "run", ["tensorboard"]))
    assert r"| data | a \| b |" in read(tmp_path / "run" / "tensorboard")[1]


def run_example(folder: Path, *command: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "echelon", "run", "--world", "threads", "--ranks", "2", *command],
        cwd=folder,
        env=environ(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_the_example_of_a_loop_of_ones_own_is_tracked(tmp_path: Path) -> None:
    run_example(tmp_path, str(EXAMPLES / "integrations" / "trackers.py"), "tensorboard")
    values, text = read(tmp_path / "runs" / "tracked" / "tensorboard")
    assert [step for step, _ in values["train/loss"]] == list(range(1, 51))
    assert values["train/loss"][-1][1] < values["train/loss"][0][1]
    assert values.keys() == {"train/loss", "train/gradient_norm"}
    assert "| lr | 0.01 |" in text


@pytest.mark.slow
def test_the_gpt_is_tracked_by_each_tracker_that_an_option_names(tmp_path: Path) -> None:
    small = "--steps 4 --eval-every 2 --batch-size 4 --context 16 --layers 1 --width 16 --heads 2"
    (tmp_path / "text.txt").write_text("a text that repeats itself\n" * 2000)
    options = [*small.split(), "--data", "text.txt", "--tracker", "tensorboard=logs"]
    run_example(tmp_path, str(EXAMPLES / "train_gpt.py"), *options, "--track-each-rank")
    for rank in range(RANKS):
        values, _ = read(tmp_path / "logs" / "gpt" / f"rank-{rank}")
        assert [step for step, _ in values["train/loss"]] == [1, 2, 3, 4]
        assert [step for step, _ in values["validation/loss"]] == [2, 4]
