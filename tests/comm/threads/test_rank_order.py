"""What worlds ask of the order of their ranks, whatever it is."""

from __future__ import annotations

import time

import pytest
import torch

import echelon as ec
from echelon.comm.threads.free_running import FreeRunning
from echelon.comm.threads.rank_order import RankOrder, current_owner
from echelon.comm.threads.turns import Turns


@pytest.mark.parametrize("kind", [FreeRunning, Turns])
def test_a_sleep_ends_when_its_time_is_up_and_when_it_is_woken(kind: type[RankOrder]) -> None:
    order = kind(1)
    with order.of_rank(0):
        with order.lock:
            start_s = time.monotonic()
            order.sleep(0, 0.05)
            order.resume(0)
        assert 0.05 <= time.monotonic() - start_s < 5
        order.pause(0)
    order.close()


def test_the_owner_of_the_state_is_known_on_the_threads_of_ranks_that_take_turns() -> None:
    def main(world: ec.World) -> bool:
        return current_owner() is not None

    assert ec.run(main, 2) == [True, True]
    assert ec.run(main, 2, concurrent=True) == [False, False]
    assert current_owner() is None


@pytest.mark.slow
def test_the_clocks_of_ranks_show_their_own_time_joined_where_they_meet() -> None:
    def main(world: ec.World) -> tuple[float, float]:
        order = world.group._world.order  # type: ignore[attr-defined]
        time.sleep(0.1 * (1 + world.rank))
        before = order.clock(world.rank)
        world.group.all_reduce(torch.ones(1))
        return before, order.clock(world.rank)

    results = ec.run(main, 3)
    for rank, (before, after) in enumerate(results):
        # One clock for all would have shown 0.3 s for rank 1, and 0.6 s for rank 2.
        assert 0.1 * (1 + rank) <= before < 0.1 * (1 + rank) + 0.08
        assert after >= results[2][0]
