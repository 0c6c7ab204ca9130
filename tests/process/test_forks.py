"""A process that a rank forks owns nothing of the rank's world, in every world."""

import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.errors import StateError
from tests.cli.jobs import Job
from tests.worlds import KINDS, run_world

ENDS = ("return", "sys.exit(0)", "raise", "with", "collective", "wait")


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the process has other threads
        return os.fork()


def in_the_child(world: ec.World, how: str, told: Path, work: ec.Work) -> int:
    """What a forked process does before its end; the result of its rank function."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        match how:
            case "sys.exit(0)":
                sys.exit(0)
            case "raise":
                raise ValueError("of the child")
            case "with":
                with world:
                    sys.exit(0)
            case "collective":
                world.group.all_reduce(torch.ones(1))
            case "wait":
                work.wait()
    except StateError as error:
        told.write_text(str(error))
        os._exit(0)
    return -1


def forks(world: ec.World, how: str, told: Path) -> list[float]:
    """Rank 1 forks; over gloo its child leaves here, because nothing of ours called this."""
    weight = torch.full((2,), world.rank + 1.0, requires_grad=True)
    weight.square().sum().backward()
    assert weight.grad is not None
    work = world.group.all_reduce(torch.ones(1), async_op=True)
    assert work is not None
    if world.rank == 1:
        pid = fork()
        if pid == 0:
            if world.backend != "gloo":
                return [in_the_child(world, how, told, work)]
            with suppress(SystemExit, ValueError):
                in_the_child(world, how, told, work)
            world.close()
            os._exit(0)
        os.waitpid(pid, 0)
    work.wait()
    for _ in range(5):
        total = weight.grad.clone()
        world.group.all_reduce(total)
    return total.tolist()


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_child_ends_as_it_likes_and_its_rank_goes_on(kind: str, how: str, tmp_path: Path) -> None:
    told = tmp_path / "told"
    assert run_world(kind, forks, 2, args=(how, told)) == [[6.0, 6.0]] * 2
    if how in ("collective", "wait"):
        text = told.read_text()
        assert "which rank 1 has forked: a forked process is no rank" in text
        assert "all_reduce(sum) float32[1]" in text


class Rows(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


def loads(world: ec.World) -> float:
    """Trains on rows that forked processes load."""
    model = ec.DDP(torch.nn.Linear(2, 1), world.group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        rows = torch.utils.data.DataLoader(
            Rows(), batch_size=2, num_workers=2, multiprocessing_context="fork"
        )
        total = 0.0
        for batch in rows:
            model(batch * (world.rank + 1)).sum().backward()
            total += batch.sum().item()
    return total


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_forked_loaders_of_data_work_in_ranks(kind: str) -> None:
    assert run_world(kind, loads, 2) == [56.0, 56.0]


SCRIPT = """
import os, sys, torch
import echelon as ec

with ec.init(sys.argv[1]) as world:
    if world.rank == 1 and os.fork() == 0:
        torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1).step()
        sys.exit(0)
    for _ in range(20):
        total = torch.ones(1)
        world.group.all_reduce(total)
    assert (world.step, total.item()) == (0, 2.0)
    if world.rank == 0:
        print("fine", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_child_of_a_script_leaves_by_the_interpreters_own_end(
    backend: str, tmp_path: Path
) -> None:
    with Job(tmp_path, SCRIPT, backend, options=("--tee",)) as job:
        assert job.end() == (0, "[rank 0] fine\n", [])
