"""Code that only knows torch.distributed finds the simulated rank that runs."""

import threading

import pytest

import echelon as ec
from echelon.c10d import simulated_rank
from echelon.errors import StateError


def looks(world: ec.World) -> bool:
    world.group.barrier()
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(simulated_rank.world_group()))
    thread.start()
    thread.join()
    return seen == [world.group] and simulated_rank.require_world_group() is world.group


def test_a_rank_and_its_threads_find_its_group_and_others_find_none() -> None:
    assert ec.run(looks, 3) == [True] * 3
    assert simulated_rank.world_group() is None
    with pytest.raises(StateError, match="none runs now"):
        simulated_rank.require_world_group()
