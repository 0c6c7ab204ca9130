import os
import threading
import time

import pytest
import torch

import echelon as ec
from echelon.cli import running_jobs


def wait_for_a_late_rank(world: ec.World) -> None:
    if world.rank == 1:
        time.sleep(10)
    world.group.all_reduce(torch.ones(7), label="late")


def jobs_of_this_process() -> list[running_jobs.RunningJob]:
    return [job for job in running_jobs.running_jobs() if job.pid == os.getpid()]


@pytest.mark.slow
def test_a_running_job_shows_who_waits_for_whom_in_which_call_and_where(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = threading.Thread(target=ec.run, args=(wait_for_a_late_rank, 2, "processes"))
    run.start()
    end = time.monotonic() + 60
    row = ""
    while time.monotonic() < end and "waits for rank 1" not in row:
        time.sleep(0.1)
        row = next((job.lines()[2] for job in jobs_of_this_process()), "")
    assert "waits for rank 1" in row
    assert "all_reduce(sum) float32[7]" in row
    assert "MiB" in row
    assert running_jobs.show_job(os.getpid(), with_stacks=True) == 0
    assert "in wait_for_a_late_rank" in capsys.readouterr().out
    run.join()
    assert jobs_of_this_process() == []


def test_a_process_that_is_no_job_gives_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert running_jobs.show_job(1, with_stacks=False) == 1
    assert "echelon ps" in capsys.readouterr().out
