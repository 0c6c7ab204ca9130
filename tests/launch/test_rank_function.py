"""A function without a world is a program of torch.distributed, and ranks call it as such."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import echelon as ec
from echelon.launch.rank_function import taking_world


def program() -> int:
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def program_with_arguments(first: int, second: int) -> list[int]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    dist.destroy_process_group()
    return [first, second, rank]


@pytest.mark.parametrize("world", ["threads", "processes"])
def test_ranks_run_a_program_that_takes_no_world(world: str) -> None:
    assert ec.run(program, 3, world) == [3, 3, 3]
    assert ec.run(program_with_arguments, 2, world, args=(4, 5)) == [[4, 5, 0], [4, 5, 1]]


def test_a_function_gets_its_world_whenever_it_takes_it() -> None:
    def with_default(world: ec.World | None = None) -> bool:
        return world is not None

    def with_rest(*args: object) -> int:
        return len(args)

    assert ec.run(with_default, 1) == [True]
    assert ec.run(with_rest, 1) == [1]
    assert ec.run(with_rest, 1, args=(2, 3)) == [3]
    assert taking_world(print, 0) is print  # whose parameters are in C


def test_a_function_that_takes_other_arguments_is_pythons_error() -> None:
    def two(world: ec.World, number: int) -> None: ...

    with pytest.raises(TypeError, match="number"):
        ec.run(two, 2)
    with pytest.raises(TypeError, match="takes 2 positional arguments but 4 were given"):
        ec.run(two, 2, args=(1, 2, 3))


def test_calls_of_a_program_can_be_stepped_through() -> None:
    assert [call.op for call in ec.step_through(program, 2)] == ["all_reduce"]
