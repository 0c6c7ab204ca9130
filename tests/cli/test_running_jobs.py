import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import echelon as ec
from echelon.cli import running_jobs
from echelon.diagnosis.flight_recorder import Phase, RankStatus


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


CALL = "all_reduce(mean) float32[4225] of 'gradients of 0.weight … 2.bias' (#7 of group 'world 0')"


def status_of(rank: int) -> RankStatus:
    return RankStatus(
        rank=rank,
        pid=os.getpid(),
        start_ticks=0,
        thread_id=threading.get_ident(),
        native_id=threading.get_native_id(),
        stacks_fd=None,
        attempt=0,
        phase=Phase.RUNNING,
        step=12,
        waits_for=1 - rank,
        call=CALL,
        timeout_s=60.0,
        script_ended=False,
        gave_up_on=None,
        script_waits=True,
        in_torch=False,
    )


def test_where_a_terminal_is_too_narrow_for_a_table_calls_have_rows_of_their_own() -> None:
    statuses = [status_of(0), status_of(1)]
    job = running_jobs.RunningJob(pid=7, command="train.py", statuses=statuses)
    wide = job.lines()
    assert len(wide) == 4
    assert all(line.endswith(CALL) for line in wide[2:])
    assert job.lines(max(map(len, wide))) == wide
    narrow = job.lines(80)
    assert narrow[3::2] == [f"    last call: {CALL}"] * 2
    assert all(len(line) <= 80 for line in [*narrow[:3], narrow[4]])
    assert [line.split()[0] for line in narrow[2::2]] == ["0", "1"]


def test_a_process_that_is_no_job_gives_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert running_jobs.show_job(1, with_stacks=False) == 1
    assert "echelon ps" in capsys.readouterr().out
