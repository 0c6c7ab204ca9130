"""Every rank knows how many optimizer steps it has made, without being told."""

import pytest
import torch

import echelon as ec
from echelon.errors import ArgumentError
from echelon.testing import run_faulty, slow

KINDS = ("threads", "processes")


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def counts(world: ec.World) -> list[int]:
    """The number after some steps, which differ between ranks."""
    seen = [world.step]
    one, other = optimizer(), optimizer()
    for _ in range(2 + world.rank):
        one.step()
        other.step()  # as the second network of two has
    seen.append(world.step)
    world.step = 100  # as after a resume
    seen.append(world.step)
    one.step()
    other.step()
    one.step()
    seen.append(world.step)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_steps_of_all_optimizers_of_a_rank_are_counted_as_one_sequence(kind: str) -> None:
    assert ec.run(counts, 3, kind) == [[0, 2 + rank, 100, 102] for rank in range(3)]


def skips(world: ec.World) -> int:
    scaler = ec.GradScaler(world.group, device="cpu", init_scale=2.0)
    model = torch.nn.Linear(2, 1)
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale((model(torch.ones(1, 2)) * factor).sum()).backward()
        scaler.step(steps)
        scaler.update()
        steps.zero_grad()
    return world.step


def test_a_step_that_is_skipped_is_not_counted() -> None:
    assert ec.run(skips, 2) == [2, 2]


def sets(world: ec.World, value: object) -> None:
    world.step = value  # type: ignore[assignment]


@pytest.mark.parametrize("value", [-1, 1.5, "3", None])
def test_a_step_that_is_no_whole_number_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match=r"step is .*; give a whole number >= 0"):
        ec.run(sets, 1, args=(value,))


def test_a_rank_under_a_fault_counts_too() -> None:
    assert run_faulty(counts, 2, slow(0.0), rank=1) == [[0, 2, 100, 102], [0, 3, 100, 102]]


def fails_after_three(world: ec.World) -> None:
    steps = optimizer()
    for _ in range(3):
        steps.step()
    world.group.barrier()
    if world.rank == 1:
        raise KeyError("lost")
    world.group.barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_of_run_tells_the_step_once_there_was_one(kind: str) -> None:
    with pytest.raises(KeyError) as info:
        ec.run(fails_after_three, 2, kind)
    assert info.value.__notes__ == ["raised on rank 1 of 2", "rank 1 was at step 3"]
