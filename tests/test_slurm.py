"""The scripts of docs/slurm.md, with small programs in the place of Slurm's."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import echelon as ec
from tests.documented_jobs import (
    DOCS,
    RANKS,
    SAVE_EVERY,
    STEPS,
    blocks,
    children,
    environ_of_job,
    started_job,
    trains_on,
)
from tests.processes import free_port, wait_until

# Starts the ranks as the tasks of one host, tells them signals, and ends with the highest code.
TASKS = f"""#!{sys.executable}
import os, signal, subprocess, sys
command = [word for word in sys.argv[1:] if not word.startswith("--")]
tasks = []
for rank in range({RANKS}):
    slurm = {{"PROCID": rank, "LOCALID": rank, "NTASKS": {RANKS}, "NNODES": 1}}
    env = {{**os.environ, **{{f"SLURM_{{name}}": str(value) for name, value in slurm.items()}}}}
    tasks.append(subprocess.Popen(command, env=env))
signal.signal(signal.SIGUSR1, lambda *_: tasks[1].send_signal(signal.SIGUSR1))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
# One task, of which srun passes on signals and exit code.
ONE_TASK = '#!/bin/bash\nexec "$@"\n'
SCONTROL = """#!/bin/bash
if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >>asked; fi
"""


def port_of_job() -> int:
    """A number of a job whose port, as the script computes it, is free."""
    for job in range(os.getpid(), os.getpid() + 1000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 12000 + job % 18000)):
                return job
    raise AssertionError("all ports are taken")


@contextmanager
def batch_job(folder: Path, script: str, srun: str) -> Iterator[subprocess.Popen[str]]:
    """A script of the document as Slurm would run it, in a folder with its training script."""
    programs = {"srun": srun, "scontrol": SCONTROL}
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in programs.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "job.sh").write_text(script)
    slurm = {"JOB_ID": str(port_of_job()), "JOB_NODELIST": "n[1-2]", "JOB_NUM_NODES": "1"}
    env = {f"SLURM_{name}": value for name, value in slurm.items()}
    env |= {"SLURM_GPUS_ON_NODE": str(RANKS), "MASTER_PORT": str(free_port())}
    env = environ_of_job(folder / "bin", **env)
    with started_job(["bash", "job.sh"], folder, env) as process:
        yield process


@pytest.mark.parametrize("script", blocks("slurm.md", "bash"))
def test_the_scripts_are_shell(script: str) -> None:
    assert script.startswith("#!/bin/bash\n#SBATCH ")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_the_signal_comes_before_the_ranks_have_no_time_left() -> None:
    text = (DOCS / "slurm.md").read_text() + (DOCS / "resume.md").read_text()
    before, given, counted = (
        {int(number) for number in re.findall(pattern, text)}
        for pattern in (r"USR1@(\d+)", r"SHUTDOWN_TIMEOUT=(\d+)", r"grace_s=(\d+)")
    )
    assert len(before) == len(given) == len(counted) == 1
    assert min(before) > min(given) >= min(counted)


@pytest.mark.parametrize("code", [0, 3, 75])
def test_tasks_that_leave_with_75_are_requeued(code: int, tmp_path: Path) -> None:
    with batch_job(tmp_path, blocks("slurm.md", "bash")[0], f"#!/bin/bash\nexit {code}\n") as job:
        assert job.wait(timeout=60) == code
    assert (tmp_path / "asked").exists() == (code == 75)


@pytest.mark.parametrize(
    ("asked", "code", "expected"), [(False, 0, 0), (False, 1, 1), (True, 0, 0), (True, 1, 75)]
)
def test_a_torchrun_that_fails_after_a_signal_is_requeued(
    asked: bool, code: int, expected: int, tmp_path: Path
) -> None:
    ranks = f"trap 'exit {code}' USR1; touch ready; while :; do sleep 0.1; done"
    srun = f"#!/bin/bash\n{ranks if asked else f'exit {code}'}\n"
    with batch_job(tmp_path, blocks("slurm.md", "bash")[1], srun) as job:
        if asked:
            wait_until((tmp_path / "ready").exists, job)
            job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=60) == expected
    assert (tmp_path / "asked").exists() == (expected == 75)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The weights of a job that nobody stops."""
    return trains_on(tmp_path_factory.mktemp("straight"))


def check_requeued(number: int, folder: Path, straight: dict[str, Any]) -> None:
    """Refuse a job that its signal does not stop in time, or that ends otherwise than another."""
    script, srun = blocks("slurm.md", "bash")[number], (TASKS, ONE_TASK)[number]
    with batch_job(folder, script, srun) as job:
        wait_until(lambda: ec.steps(folder / "runs" / "a"), job)
        # Without B: the signal is for the steps of the job, with it for the shell.
        for pid in [job.pid] if "B:USR1" in script else children(job.pid):
            os.kill(pid, signal.SIGUSR1)
        _, errors = job.communicate(timeout=90)
        assert job.returncode == 75, errors
    assert (folder / "asked").read_text().startswith("requeue ")
    assert SAVE_EVERY <= ec.steps(folder / "runs" / "a")[-1] < STEPS
    weights = trains_on(folder)
    assert all(torch.equal(value, straight[name]) for name, value in weights.items())


@pytest.mark.slow
def test_a_job_whose_time_is_over_is_requeued_and_ends_as_one_that_had_more(
    tmp_path: Path, straight: dict[str, Any]
) -> None:
    check_requeued(1, tmp_path, straight)  # under torchrun; tests/long has plain tasks, too
