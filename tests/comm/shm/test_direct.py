"""Memory of a rank that dies, or is freed, while its peers read it."""

import os

import pytest
import torch

import echelon as ec
from echelon.comm.shm.area import Area
from echelon.comm.shm.direct import Direct
from echelon.errors import CommError, RankFailed

LARGE = 100_000


def dies_before_it_is_read(world: ec.World) -> None:
    tensor = torch.ones(LARGE)
    world.group.all_reduce(tensor)
    if world.rank == 1:
        Direct.all_reduce = lambda *arguments: os._exit(3)
    world.group.all_reduce(tensor, label="layer 7")


def test_a_rank_that_dies_while_others_read_its_memory_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 ended with exit code 3.*all_reduce.*layer 7"):
        ec.run(dies_before_it_is_read, 3, "processes")


def takes_its_memory_away(world: ec.World) -> None:
    if world.rank == 1:
        agree = Area.agree
        Area.agree = lambda area, call, key, address: agree(area, call, key, 8)
    world.group.all_reduce(torch.ones(LARGE))


def test_memory_that_is_gone_is_an_error_on_every_rank() -> None:
    with pytest.raises(CommError, match=r"rank 0 could not read \d+ bytes of rank 1 during all_re"):
        ec.run(takes_its_memory_away, 2, "processes")
