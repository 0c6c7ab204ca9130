"""Ranks under torchrun end, and say why, when its agent is killed."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.jobs import Job

SCRIPT = """
import pathlib, sys, time, torch
import echelon as ec

with ec.init(sys.argv[1], timeout=6) as world:
    weight = torch.ones(2, requires_grad=True)
    for step in range(10_000):
        (weight * (world.rank + 1)).sum().backward()
        world.group.all_reduce(weight.grad)
        weight.grad = None
        time.sleep(0.05)
        if step == 3:
            pathlib.Path(sys.argv[2], f"trains-{world.rank}").touch()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_ranks_whose_agent_is_killed_end_within_the_timeout_and_say_so(
    backend: str, tmp_path: Path
) -> None:
    with Job(tmp_path, SCRIPT, backend, str(tmp_path), launcher=TORCHRUN) as job:
        job.wait_for("trains-0", "trains-1")
        os.kill(job.launcher.pid, signal.SIGKILL)
        start_s = time.monotonic()
        _, _, lines = job.end()  # which is when the last rank has closed its standard error
        assert time.monotonic() - start_s < 6 + 10
    said = "\n".join(lines)
    assert "the agent of torchrun on the host of rank" in said
    assert f"(process {job.launcher.pid}) has ended, and its ranks end with it" in said
