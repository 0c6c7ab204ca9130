"""A default group is made for jobs, once, and not for a process alone."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from echelon.c10d.default_group import start_default_group
from tests.processes import free_port, run_python

JOB = """
import torch.distributed as dist
from echelon.c10d.default_group import start_default_group
start_default_group(20.0)
group = dist.group.WORLD
start_default_group(20.0)
assert dist.group.WORLD is group
print(dist.get_backend())
"""


def test_a_process_alone_gets_no_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    start_default_group(1.0)
    assert not dist.is_initialized()


@pytest.mark.slow
def test_a_process_of_a_job_gets_one_and_keeps_it() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    done = run_python("-c", JOB, **variables, MASTER_PORT=str(free_port()))
    assert done.stdout == "echelon\n", done.stderr
