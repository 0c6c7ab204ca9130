from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
import echelon.observe.recorder as recorder_module
from echelon.observe import Recorder, RunInfo, read_metrics, run_output


@pytest.fixture(autouse=True)
def no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second and has tests of its own."""
    monkeypatch.setattr(run_output, "write_report", lambda folder, live=False: None)


def record(world: ec.World, folder: Path, steps: int = 3, **options: Any) -> Path | None:
    """A small run with a real backward and rank-dependent data."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    info = RunInfo(total_steps=steps, unit="nats", references={"chance": 1.5}, config={"lr": 0.1})
    with Recorder(world, folder, info, **options) as recorder:
        for step in range(1, steps + 1):
            loss = model(torch.full((2, 4), world.rank + 1.0)).square().mean()
            loss.backward()
            world.group.all_reduce(model.weight.grad, "mean")
            optimizer.step()
            recorder.measure(model, optimizer)
            recorder.step(step, loss.item(), num_tokens=8, learning_rate=0.1)
        recorder.evaluation(steps, 0.5)
        recorder.note("sample", "some <text>")
    return recorder.folder


def test_rank_0_writes_what_all_ranks_did(tmp_path: Path) -> None:
    folders = ec.run(record, 3, args=(tmp_path / "run",))
    assert folders == [tmp_path / "run", None, None]
    lines = read_metrics(tmp_path / "run")
    assert [line["kind"] for line in lines] == [
        *["start", "step", "step", "step", "evaluation", "note", "ranks", "end"]
    ]
    start, step, ranks = lines[0], lines[1], lines[-2]["ranks"]
    assert (start["ranks"], start["backend"], start["references"]) == (
        3,
        "threads",
        {"chance": 1.5},
    )
    assert step["learning_rate"] == 0.1
    assert step["tokens_per_s"] > 0
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    for rank in ranks:
        assert rank["comm"]["all_reduce"]["calls"] == 3
        assert rank["comm"]["all_reduce"]["nbytes"] == 3 * 16
        assert rank["memory"]["optimizer state"]["peak"] == 20


def test_a_second_run_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    for _ in range(3):
        ec.run(record, 1, args=(tmp_path / "run", 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "run-3"]


def test_a_run_that_fails_keeps_its_steps_and_hangs_nobody(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        with Recorder(world, tmp_path / "run", RunInfo(total_steps=9)) as recorder:
            recorder.step(1, 2.0, num_tokens=8)
            if world.rank == 1:
                raise KeyError("boom")
            world.group.barrier()

    with pytest.raises(KeyError, match="boom"):
        ec.run(main, 2)
    lines = read_metrics(tmp_path / "run")
    assert [line["kind"] for line in lines] == ["start", "step", "failure"]
    assert "rank 1" in lines[-1]["text"]


def test_a_step_has_memory_phases_and_what_the_script_adds(tmp_path: Path) -> None:
    ec.run(record, 2, args=(tmp_path / "run",))
    start, *steps = (
        line for line in read_metrics(tmp_path / "run") if line["kind"] in ("start", "step")
    )
    assert start["environment"]["torch"] == torch.__version__
    assert steps[0]["memory"]["parameters"] == 20
    assert steps[0]["process_peak"] > 0
    assert steps[0]["phases"] == {}  # the first step warms up
    assert 0 < sum(steps[2]["phases"].values()) < 60


def test_a_save_stands_at_its_time(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        model = nn.Linear(4, 1)
        with Recorder(world, tmp_path / "run", RunInfo(total_steps=2)) as recorder:
            recorder.step(1, 1.0, num_tokens=1)
            ec.save(tmp_path / "checkpoints", step=1, model=ec.DDP(model, world.group))
            recorder.step(2, 1.0, num_tokens=1)

    ec.run(main, 2)
    lines = read_metrics(tmp_path / "run")
    (save,) = (line for line in lines if line["kind"] == "save")
    assert (save["step"], save["nbytes"] > 0, save["seconds"] > 0) == (1, True, True)
    first, second = (line["time_s"] for line in lines if line["kind"] == "step")
    assert first <= save["time_s"] <= second


def test_a_restarted_job_goes_on_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def main(world: ec.World, *, fails: bool) -> None:
        with Recorder(world, tmp_path / "run", RunInfo(total_steps=1)) as recorder:
            if fails:
                raise KeyError("boom")
            recorder.step(1, 1.0, num_tokens=1)

    attempts = [recorder_module.JobAttempt(job="j", number=number) for number in range(2)]
    monkeypatch.setattr(recorder_module, "JobAttempt", FixedAttempt(attempts[0]))
    with pytest.raises(KeyError):
        ec.run(partial(main, fails=True), 1)
    monkeypatch.setattr(recorder_module, "JobAttempt", FixedAttempt(attempts[1]))
    ec.run(partial(main, fails=False), 1)
    lines = read_metrics(tmp_path / "run")
    assert [line["attempt"] for line in lines if line["kind"] == "start"] == [0, 1]
    assert lines[-1]["kind"] == "end"


class FixedAttempt:
    """What the launcher says, whatever the environment is."""

    def __init__(self, attempt: object) -> None:
        self._attempt = attempt

    def of(self, env: object) -> object:
        return self._attempt


def test_ranks_of_a_timeline_may_be_some_of_the_job(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        with Recorder(world, tmp_path / "run", RunInfo(total_steps=1)) as recorder:
            recorder.timelines({"planned": [(1, "1F0", 0.0, 1.0)]}, ranks=(0, 2))

    ec.run(main, 1)
    (line,) = (line for line in read_metrics(tmp_path / "run") if line["kind"] == "timelines")
    assert line["timelines"] == {"planned": [[2, "1F0", 0.0, 1.0]]}


def test_a_trace_is_written_when_asked(tmp_path: Path) -> None:
    def main(world: ec.World, folder: Path) -> None:
        record(world, folder, 1, trace=folder.name == "traced")

    for name in ("traced", "plain"):
        ec.run(main, 2, args=(tmp_path / name,))
    assert (tmp_path / "traced" / "trace.json").exists()
    assert not (tmp_path / "plain" / "trace.json").exists()


def test_evaluation_is_no_part_of_a_steps_time(tmp_path: Path, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("echelon.observe.recorder.time.perf_counter", lambda: now[0])

    def main(world: ec.World) -> None:
        with Recorder(world, tmp_path / "run", RunInfo(total_steps=2)) as recorder:
            now[0] += 2
            recorder.step(1, 1.0, num_tokens=10)
            now[0] += 100
            recorder.evaluation(1, 1.0)
            now[0] += 2
            recorder.step(2, 1.0, num_tokens=10)

    ec.run(main, 1)
    steps = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "step"]
    assert [line["tokens_per_s"] for line in steps] == [5.0, 5.0]
