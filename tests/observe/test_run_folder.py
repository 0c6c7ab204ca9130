import json
from pathlib import Path

import pytest

import echelon as ec
from echelon.observe.run_folder import JobAttempt, MetricsFolder
from tests.observe.runs import run_lines

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_RESTART_COUNT": "2",
}


def write(folder: Path, *, finished: bool, **facts: object) -> None:
    folder.mkdir()
    lines = run_lines(ranks=1, finished=finished)
    lines[0] |= facts
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_an_attempt_is_what_the_launcher_says() -> None:
    assert JobAttempt.of(TORCHRUN) == JobAttempt(job="job-7", number=2)
    assert JobAttempt.of({}) == JobAttempt()


def test_an_environment_that_nobody_reads_may_be_wrong() -> None:
    assert JobAttempt.of({"RANK": "x", "WORLD_SIZE": "2"}) == JobAttempt()


def test_a_restarted_job_goes_on_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "run", finished=False, job="job-7", attempt=0)
    taken = MetricsFolder.take(tmp_path / "run", JobAttempt(job="job-7", number=1))
    assert taken == MetricsFolder(path=tmp_path / "run", is_continued=True)


@pytest.mark.parametrize(
    ("finished", "job", "attempt", "number"),
    [
        (True, "job-7", 0, 1),  # it has come to its end
        (False, "job-8", 0, 1),  # another job
        (False, "job-7", 0, 0),  # not restarted: a second run of a job of this name
        (False, "job-7", 1, 1),  # a second run in the same attempt
    ],
)
def test_any_other_run_gets_a_folder_of_its_own(
    tmp_path: Path, finished: bool, job: str, attempt: int, number: int
) -> None:
    write(tmp_path / "run", finished=finished, job=job, attempt=attempt)
    taken = MetricsFolder.take(tmp_path / "run", JobAttempt(job="job-7", number=number))
    assert taken == MetricsFolder(path=tmp_path / "run-2", is_continued=False)


def test_a_folder_that_holds_no_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    taken = MetricsFolder.take(tmp_path / "run", JobAttempt(job="job-7", number=1))
    assert taken.path == tmp_path / "run-2"


def test_a_folder_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ec.ArgumentError, match="cannot make the folder"):
        MetricsFolder.take(tmp_path / "file" / "run", JobAttempt())
