"""The commands of docs/mpi.md, with two ranks on this machine."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import echelon as ec
from tests.documented_jobs import (
    RANKS,
    SAVE_EVERY,
    STEPS,
    blocks,
    environ_of_job,
    started_job,
    trains_on,
)
from tests.processes import free_port, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun of Open MPI"),
]
ONE_HOST, SEVERAL_HOSTS = blocks("mpi.md", "bash")


@contextmanager
def mpi_job(folder: Path, command: str) -> Iterator[subprocess.Popen[str]]:
    """A command of the page, with the training script in ``folder``."""
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env = environ_of_job(OMPI_MCA_rmaps_base_oversubscribe="1", **root)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with started_job(["bash", "-c", f"exec {command}"], folder, env, **streams) as process:
        yield process


def test_a_job_that_gets_sigusr1_exits_with_75_and_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path,
) -> None:
    for name in ("stopped", "straight"):
        (tmp_path / name).mkdir()
    assert f"-n {RANKS} " in ONE_HOST
    with mpi_job(tmp_path / "stopped", ONE_HOST) as job:
        wait_until(lambda: ec.steps(tmp_path / "stopped" / "runs" / "a"), job)
        job.send_signal(signal.SIGUSR1)
        output, _ = job.communicate(timeout=90)
        assert job.returncode == ec.EXIT_RESUMABLE, output
    assert SAVE_EVERY <= ec.steps(tmp_path / "stopped" / "runs" / "a")[-1] < STEPS
    stopped, straight = (trains_on(tmp_path / name) for name in ("stopped", "straight"))
    assert all(torch.equal(value, straight[name]) for name, value in stopped.items())


def test_ranks_meet_at_the_address_and_port_that_mpirun_hands_on(tmp_path: Path) -> None:
    command = SEVERAL_HOSTS.replace("node1:8,node2:8", "localhost:2").replace("node1", "127.0.0.1")
    command, number = re.subn(r"-n 16\b", f"-n {RANKS}", command)
    port = str(free_port())
    assert number == 1
    assert "MASTER_PORT=29500" in command
    with mpi_job(tmp_path, command.replace("29500", port)) as job:
        output, _ = job.communicate(timeout=100)
    assert job.returncode == 0, output
    assert ec.steps(tmp_path / "runs" / "a")[-1] == STEPS
