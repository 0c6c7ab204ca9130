"""Ranks that make groups with one that has ended name it at once, in every world."""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.errors import CommTimeout, RankFailed
from tests.cli.jobs import Job
from tests.comm.gloo_ranks import gloo_outcomes

ENDS = {
    "raise": "raised ValueError: boom",
    "return": "left",
    "sys.exit(0)": "raised SystemExit: 0",
    "sys.exit(1)": "raised SystemExit: 1",
    "os._exit(0)": "died",
    "os._exit(1)": "died",
    "SIGKILL": "died",
    "SIGSEGV": "died",
}


def ends(how: str) -> None:
    match how:
        case "raise":
            raise ValueError("boom")
        case "sys.exit(0)" | "sys.exit(1)":
            sys.exit(int(how[-2]))
        case "os._exit(0)" | "os._exit(1)":
            os._exit(int(how[-2]))
        case "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        case "SIGSEGV":
            ctypes.string_at(0)


def makes_a_mesh(world: ec.World, how: str) -> float:
    weight = torch.full((2,), world.rank + 1.0, requires_grad=True)
    weight.square().sum().backward()
    world.group.all_reduce(weight.grad)
    if world.rank == 1:
        ends(how)
        return 0.0
    start_s = time.monotonic()
    try:
        world.mesh(pp=2, dp=2)
    except RankFailed as error:
        error.seconds = time.monotonic() - start_s  # type: ignore[attr-defined]
        raise
    return 0.0


@pytest.mark.parametrize("how", ENDS)
def test_a_rank_that_ends_while_others_make_a_mesh_is_named_by_all_of_them(how: str) -> None:
    found = gloo_outcomes(makes_a_mesh, 4, args=(how,), timeout=40.0)
    for rank in (0, 2, 3):
        error = found[rank][0]
        assert isinstance(error, RankFailed), (rank, error)
        assert error.failed_rank == 1
        assert ENDS[how] in error.cause
        assert error.seconds < 5.0  # type: ignore[attr-defined]


SCRIPT = """
import os, sys
import echelon as ec

with ec.init("gloo", timeout=40) as world:
    world.group.barrier()
    if world.rank == 1:
        {}
    world.mesh(pp=2, dp=2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sys.exit(0)", "sys.exit(1)", "os._exit(0)", "os._exit(1)"])
def test_in_a_script_the_first_line_is_of_the_rank_that_has_ended(how: str, tmp_path: Path) -> None:
    with Job(tmp_path, SCRIPT.format(how), options=("--ranks", "4")) as job:
        code, _, lines = job.end()
        assert job.processes() == {}
    assert code == 1
    assert lines[0].startswith(f"rank 1 at step 0 exited with code {how[-2]}")


@pytest.mark.slow_for("processes")
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_so_is_one_that_returns_in_other_worlds(kind: str) -> None:
    with pytest.raises(ec.CommError, match=r"rank 1 (returned|closed)"):
        ec.run(makes_a_mesh, 4, kind, args=("return",), timeout=40.0)


def does_not_come(world: ec.World) -> None:
    world.group.barrier()
    if world.rank == 1:
        time.sleep(3.0)
    else:
        world.group.subgroup([0, 1, 2])


def test_a_rank_that_does_not_come_to_a_new_group_is_named_alone() -> None:
    found = gloo_outcomes(does_not_come, 3, timeout=1.0)
    for rank in (0, 2):
        error = found[rank][0]
        assert isinstance(error, CommTimeout), (rank, error)
        assert error.missing == (1,)
        assert list(error.stuck) == [1]
