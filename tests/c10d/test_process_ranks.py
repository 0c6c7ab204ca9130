"""Programs of torch.distributed in processes that ``ec.run`` starts."""

import os

import torch
import torch.distributed as dist

import echelon as ec
from echelon.c10d.process_group import ProcessGroupEchelon
from echelon.c10d.rank_variables import rank_variables


def finds_its_place(world: ec.World) -> tuple[list[str], bool, int]:
    variables = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    dist.init_process_group("gloo", init_method="env://")
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total)
    is_ours = isinstance(dist.group.WORLD, ProcessGroupEchelon)
    dist.destroy_process_group()
    return variables, is_ours, int(total)


def test_a_process_finds_the_variables_of_torchrun_and_meets_without_a_port() -> None:
    before = dict(os.environ)
    assert ec.run(finds_its_place, 2, "processes") == [
        (["0", "2", "0"], True, 1),
        (["1", "2", "1"], True, 1),
    ]
    assert dict(os.environ) == before


def counts_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def returns_nothing(world: ec.World) -> None:
    """Only starts and ends."""


def test_the_caller_keeps_no_store_open() -> None:
    ec.run(returns_nothing, 1, "processes")
    before = counts_descriptors()
    ec.run(returns_nothing, 1, "processes")
    assert counts_descriptors() == before


def test_the_variables_have_all_that_torchrun_sets_for_one_host() -> None:
    assert {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"} <= set(
        rank_variables(0, 1, 1)
    )
