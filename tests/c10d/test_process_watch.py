"""What a process that uses torch.distributed alone tells the others of itself."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import echelon as ec
from echelon.errors import CommTimeout, RankFailed


def stays_away(world: ec.World, timeout: float | None) -> None:
    if world.rank == 0 and timeout is None:
        return
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    if world.rank == 0:
        return
    if timeout is not None:
        assert isinstance(group, dist.ProcessGroup)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), group)
    if world.rank == 1:
        dist.recv(torch.zeros(1), 2, group=group)  # which nobody sends
    dist.all_reduce(torch.zeros(1), group=group)


def test_a_rank_that_returns_before_it_joins_is_named() -> None:
    with pytest.raises((RankFailed, CommTimeout)) as info:
        ec.run(stays_away, 3, "processes", args=(None,), timeout=4)
    assert "rank 0" in str(info.value)


@pytest.mark.parametrize("world", ["threads", "processes"])
def test_a_timeout_that_is_set_later_is_that_of_the_group_and_its_ranks_are_those_of_the_job(
    world: str,
) -> None:
    with pytest.raises(ec.EchelonError, match=r"rank [12]") as info:
        ec.run(stays_away, 3, world, args=(2.0,), timeout=60)
    assert "rank 0 waits" not in str(info.value)
