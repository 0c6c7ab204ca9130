"""What only observes neither ends nor delays a training: a full disk, a slow page."""

import errno
import os
import resource
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import echelon as ec
from echelon.observe import Recorder, RunInfo, read_metrics, run_output
from echelon.process import plain_file

INFO = RunInfo(total_steps=500)


def full(*args: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullTerminal:
    encoding = "utf-8"
    write = flush = full

    def isatty(self) -> bool:
        return False


# What fails, by the name that the warning gives it; None: a tracker, which has a sentence already.
SITES: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "a line": (
        "metrics.jsonl of",
        lambda patch: patch.setattr("echelon.observe.metrics.write_all", full),
    ),
    "the first line": (
        "metrics.jsonl of",
        lambda patch: patch.setattr("echelon.observe.metrics.create_plain", full),
    ),
    "the page": ("report.html of", lambda patch: patch.setattr(run_output, "write_report", full)),
    "the trace": (
        "trace.json of",
        lambda patch: patch.setattr("echelon.observe.trace.replace_file", full),
    ),
    "the terminal": ("the progress of", lambda patch: patch.setattr(sys, "stdout", FullTerminal())),
    "a tracker": (
        "the tracker prometheus failed",
        lambda patch: patch.setattr("echelon.observe.trackers.prometheus.replace_file", full),
    ),
}


@pytest.mark.parametrize("site", SITES)
def test_a_training_goes_on_to_its_end_wherever_the_disk_is_full(
    site: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_output, "FIRST_PAGE_S", 0.0)
    monkeypatch.setattr(run_output, "PAGE_S", 0.0)
    sentence, fill = SITES[site]
    fill(monkeypatch)

    def main(world: ec.World) -> int:
        with Recorder(world, tmp_path / "run", INFO, trace=True, to=["prometheus"]) as recorder:
            for step in range(1, 6):
                recorder.step(step, 1.0, num_tokens=10)
                recorder.evaluation(step, 1.0)
                recorder.note("a", "b")
        return step

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert ec.run(main, 2) == [5, 5]
    said = [str(each.message) for each in caught]
    assert len([text for text in said if text.startswith(sentence)]) == 1, said
    assert all("raining goes on" in text for text in said)


def fill_and_train(world: ec.World, folder: Path) -> tuple[int, list[str]]:
    with warnings.catch_warnings(record=True) as caught, Recorder(world, folder, INFO) as recorder:
        warnings.simplefilter("always")
        recorder.step(1, 1.0, num_tokens=10)
        most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, most[1]))  # in the middle of a line
        for step in range(2, 100):
            recorder.step(step, 1.0, num_tokens=10)
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
        recorder.step(100, 1.0, num_tokens=10)
    return recorder._steps, [str(each.message) for each in caught]


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_leaves_whole_lines_and_those_after_it(
    tmp_path: Path,
) -> None:
    ((steps, said),) = ec.run(fill_and_train, 1, "processes", args=(tmp_path / "run",))
    assert (steps, len(said)) == (100, 1)
    lines = read_metrics(tmp_path / "run")
    recorded = [line["step"] for line in lines if line["kind"] == "step"]
    assert recorded[:2] == [1, 2]
    assert recorded[-1] == 100
    assert len(recorded) < 100
    assert lines[-1]["kind"] == "end"


def test_a_file_of_metrics_that_comes_late_begins_with_the_start_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = plain_file.create_plain
    calls = iter([full, full, create])
    monkeypatch.setattr(
        "echelon.observe.metrics.create_plain",
        lambda *args, **options: next(calls)(*args, **options),
    )
    output = run_output.RunOutput(tmp_path, False, INFO)
    output.open()
    with pytest.warns(RuntimeWarning, match=r"metrics\.jsonl of this run could not be written"):
        output.write("start", name="run")
    output.write("note", title="lost", text="")
    output.write("note", title="kept", text="")
    assert [line.get("title") for line in read_metrics(tmp_path)] == [None, "kept"]
    with pytest.warns(RuntimeWarning, match=r"report\.html of this run"):  # no whole start line
        output.close()


def test_the_page_is_drawn_when_a_run_ends_also_by_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(run_output, "write_report", drawn.append)

    def main(world: ec.World, error: BaseException | None) -> None:
        with Recorder(world, tmp_path / "run", RunInfo(total_steps=1)):
            if error is not None:
                raise error

    with pytest.raises(KeyError):
        ec.run(main, 2, args=(KeyError("boom"),))
    assert drawn == [tmp_path / "run"]
    assert read_metrics(tmp_path / "run")[-1] == {"kind": "failure", "text": "KeyError: 'boom'"}
    ec.run(main, 2, args=(None,))
    assert drawn == [tmp_path / "run", tmp_path / "run-2"]


def test_no_step_waits_for_the_page_and_a_run_does_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_output, "FIRST_PAGE_S", 0.0)
    begun, may_end, drawn = threading.Event(), threading.Event(), []

    def draw(folder: Path, *, live: bool = False) -> None:
        begun.set()
        assert may_end.wait(30)
        drawn.append(live)

    monkeypatch.setattr(run_output, "write_report", draw)

    def main(world: ec.World) -> None:
        with Recorder(world, tmp_path / "run", INFO) as recorder:
            for step in range(1, 50):
                recorder.step(step, 1.0, num_tokens=10)
            assert begun.wait(30)
            assert drawn == []  # 49 steps, and the first page is not there yet
            may_end.set()

    ec.run(main, 1)
    assert drawn == [True, False]


def test_the_page_is_drawn_for_at_most_a_hundredth_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now: list[float] = [0.0, 0.0]  # of the training, and what drawing has taken beside it
    drawn: list[tuple[int, bool]] = []

    def draw(folder: Path, *, live: bool = False) -> None:
        drawn.append((round(now[0]), live))
        now[1] += 2.0

    def at_once(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
        target(*args)
        return threading.Thread()  # one that does not run

    monkeypatch.setattr(run_output, "time", SimpleNamespace(perf_counter=lambda: sum(now)))
    monkeypatch.setattr(run_output, "run_in_background", at_once)
    monkeypatch.setattr(run_output, "write_report", draw)
    monkeypatch.setattr(threading.Thread, "join", lambda self, timeout=None: None)
    output = run_output.RunOutput(tmp_path, False, INFO)
    while now[0] < 500:
        now[0] += 1.0
        output.update(1)
    output.close()
    assert drawn == [(10, True), (210, True), (410, True), (500, False)]
