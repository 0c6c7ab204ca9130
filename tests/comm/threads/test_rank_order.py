"""What worlds ask of the order of their ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import echelon as ec
from echelon.comm.threads.turns import Turns


def test_a_sleep_ends_when_its_time_is_up_and_when_another_thread_wakes_it() -> None:
    order = Turns(1)

    def wake() -> None:
        with order.lock:
            order.wake(0, [sleeper])

    with order.of_rank(0):
        sleeper = threading.get_ident()
        with order.lock:
            start_s = time.monotonic()
            order.sleep(0, 0.05, 20)
            order.resume(0)
            assert 0.05 <= time.monotonic() - start_s < 5
            threading.Thread(target=wake).start()  # it waits for the lock
            order.sleep(0, 20, 20)
            order.resume(0)
        assert time.monotonic() - start_s < 10
        order.yield_turn(0)
    order.close()


@pytest.mark.slow
def test_the_clocks_of_ranks_show_their_own_time_joined_where_they_meet() -> None:
    def main(world: ec.World) -> tuple[float, float]:
        order = world.group._world.order  # type: ignore[attr-defined]
        time.sleep(0.1 * (1 + world.rank))
        before = 1e-9 * order.clock(world.rank)
        world.group.all_reduce(torch.ones(1))
        return before, 1e-9 * order.clock(world.rank)

    results = ec.run(main, 3)
    for rank, (before, after) in enumerate(results):
        # One clock for all would have shown 0.3 s for rank 1, and 0.6 s for rank 2.
        assert 0.1 * (1 + rank) <= before < 0.1 * (1 + rank) + 0.08
        assert after >= results[2][0]
