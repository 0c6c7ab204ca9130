"""Ranks that make different groups of torch.distributed under one name are told so."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import echelon as ec
from echelon.errors import CollectiveMismatch, CommTimeout, DeadlockError

PAIRS = [[0, 1], [2, 3]]


def of_members(rank: int) -> dist.ProcessGroup | None:
    return dist.new_group(PAIRS[rank // 2])


def in_other_orders(rank: int) -> dist.ProcessGroup | None:
    groups = [dist.new_group(ranks) for ranks in (PAIRS if rank % 2 else PAIRS[::-1])]
    return groups[0]


def of_other_meshes(rank: int) -> dist.ProcessGroup | None:
    return DeviceMesh("cpu", PAIRS if rank < 2 else PAIRS[::-1]).get_group(1)


def of_other_sizes(rank: int) -> dist.ProcessGroup | None:
    return dist.new_subgroups(group_size=2 if rank else 4)[0]


def makes(world: ec.World, make: Callable[[int], dist.ProcessGroup | None]) -> None:
    dist.init_process_group("gloo")
    make(world.rank)


MISTAKES = [of_members, in_other_orders, of_other_meshes, of_other_sizes]


@pytest.mark.parametrize("world", ["threads", "processes"])
@pytest.mark.parametrize("make", MISTAKES, ids=lambda make: make.__name__)
def test_ranks_that_make_different_groups_are_told_so_with_their_lines(
    make: Callable[[int], object], world: str
) -> None:
    with pytest.raises(CollectiveMismatch, match="must make all groups in the same order") as info:
        ec.run(makes, 4, world, args=(make,), timeout=30)
    assert set(info.value.calls) == set(range(4))
    assert all(" at tests/c10d/" in text or __file__ in text for text in info.value.calls.values())


def gathers(world: ec.World) -> list[list[int]]:
    dist.init_process_group("gloo")
    rank, pair = world.rank, PAIRS[world.rank // 2]
    groups = [
        dist.new_group(pair, use_local_synchronization=True),
        dist.new_subgroups(group_size=2)[0],
        dist.new_subgroups_by_enumeration(PAIRS)[0],
        DeviceMesh("cpu", PAIRS).get_group(1),
        [dist.new_group(each) for each in ([3, 0], [1, 2])][rank in (1, 2)],
    ]
    ranks = []
    for group in groups:
        parts = [torch.zeros(1) for _ in range(2)]
        dist.all_gather(parts, torch.tensor([float(rank)]), group=group)
        ranks.append([int(part) for part in parts])
    dist.destroy_process_group()
    return ranks


@pytest.mark.parametrize("world", ["threads", "processes"])
def test_groups_that_all_ranks_make_have_the_ranks_that_were_asked_for(world: str) -> None:
    for rank, found in enumerate(ec.run(gathers, 4, world)):
        pair = PAIRS[rank // 2]
        assert found == [pair] * 4 + [[0, 3] if rank in (0, 3) else [1, 2]]


def is_late(world: ec.World) -> None:
    dist.init_process_group("gloo")
    if world.rank != 2:
        dist.new_group([0, 1])


@pytest.mark.parametrize("world", ["threads", "processes"])
def test_a_rank_that_makes_no_group_is_named(world: str) -> None:
    with pytest.raises((DeadlockError, CommTimeout, ec.EchelonError), match="rank 2"):
        ec.run(is_late, 3, world, timeout=4)
