import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import echelon as ec
from echelon.cli import running_jobs


def wait_for_a_late_rank(world: ec.World, looked_at: Path) -> None:
    end = time.monotonic() + 60
    while world.rank == 1 and not looked_at.exists() and time.monotonic() < end:
        time.sleep(0.1)
    world.group.all_reduce(torch.ones(7), label="late")


def jobs_of_this_process() -> list[running_jobs.RunningJob]:
    return [job for job in running_jobs.running_jobs() if job.pid == os.getpid()]


@pytest.mark.slow
def test_a_running_job_shows_who_waits_for_whom_in_which_call_and_where(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    looked_at = tmp_path / "looked at"
    options = {"args": (looked_at,)}
    run = threading.Thread(
        target=ec.run, args=(wait_for_a_late_rank, 2, "processes"), kwargs=options
    )
    run.start()
    end = time.monotonic() + 60
    row = ""
    while time.monotonic() < end and "waits for rank 1" not in row:
        time.sleep(0.1)
        row = next((job.lines()[2] for job in jobs_of_this_process()), row)
    assert "waits for rank 1" in row
    assert "all_reduce(sum) float32[7]" in row
    assert "MiB" in row
    assert running_jobs.show_job(os.getpid(), with_stacks=True) == 0
    assert "in wait_for_a_late_rank" in capsys.readouterr().out
    looked_at.touch()
    run.join()
    assert jobs_of_this_process() == []


def test_a_job_is_named_by_its_launcher_where_its_ranks_have_lower_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Process 9 was given its number after the system had begun again with low ones.
    started = {9: 200, 40: 100}
    monkeypatch.setattr(
        running_jobs.ProcessStatus,
        "of",
        lambda pid: running_jobs.ProcessStatus(state="S", parent=1, start_ticks=started[pid]),
    )
    monkeypatch.setattr(running_jobs, "_recorders", lambda pid: [(7, f"held by {pid}")])
    monkeypatch.setattr(running_jobs.FlightRecorder, "open", lambda path: path)
    working = [SimpleNamespace(ended=False)]
    monkeypatch.setattr(running_jobs, "_newest", lambda recorder: working)
    monkeypatch.setattr(running_jobs, "_processes", lambda: list(started))
    (job,) = running_jobs.running_jobs()
    assert job.pid == 40


def test_a_process_that_is_no_job_gives_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert running_jobs.show_job(1, with_stacks=False) == 1
    assert "echelon ps" in capsys.readouterr().out
