"""Every collective is right on every path of its data."""

import pytest

import echelon as ec
from echelon.comm.shm.direct import Direct
from echelon.comm.shm.staged import Staged
from tests.comm import path_checks
from tests.comm.shm.test_staged import forbid_reading


def every_path_of(world: ec.World, way: type[Direct | Staged]) -> None:
    if way is Staged and world.rank == world.size - 1:
        forbid_reading()  # on one rank: all must take the other way
    for name, check in vars(path_checks).items():
        if name.startswith("check_"):
            check(world.group)
    assert type(world.group._collectives._large) is way


@pytest.mark.slow
@pytest.mark.parametrize("way", [Direct, Staged])
@pytest.mark.parametrize("ranks", [2, 3])
def test_large_collectives_are_right_whether_ranks_may_read_each_other_or_not(ranks, way) -> None:
    ec.run(every_path_of, ranks, "processes", args=(way,))
