"""On macOS and Windows there are simulated ranks, and processes over gloo; local processes say no.

No such machine is at hand: ``hidden_system`` takes away what they do not have.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.children import environ
from tests.processes import free_port, run_python

SYSTEMS = ("darwin", "win32")
REFUSED = "refused: {} need Linux, and this is {}: take simulated ranks"


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_simulated_ranks_need_nothing_of_linux(system: str) -> None:
    process = run_python("-m", "tests.other_system", system)
    assert process.returncode == 0, process.stderr
    lines = process.stdout.splitlines()
    for works in ("ddp and its checkpoint", "fsdp and its checkpoint", "pipeline", "stop signals"):
        assert works in lines
    assert "torch.distributed" in lines
    assert "recorder and black box" in lines
    assert any(line.startswith(REFUSED.format("worlds of processes", system)) for line in lines)
    assert lines[-1] == "imports"


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_ranks_of_torchrun_meet_over_gloo(system: str) -> None:
    job = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": free_port()}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.other_system", system],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environ(
                **{name: str(value) for name, value in job.items()},
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                MASTER_ADDR="127.0.0.1",
            ),
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(ranks):
            out, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
            assert f"rank {rank} over gloo" in out.splitlines()
            assert REFUSED.format("ranks over shared memory", system) in out
    finally:
        for process in ranks:
            process.kill()
            process.wait()
