"""What worlds ask of the order of their ranks, whatever it is."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

import echelon as ec
from echelon.comm.threads.rank_order import OneRank, RankOrder
from echelon.comm.threads.running_time import running_s
from echelon.comm.threads.turns import Turns


def entered(order: RankOrder) -> AbstractContextManager[None]:
    return order.of_rank(0) if isinstance(order, Turns) else nullcontext()


@pytest.mark.parametrize("order", [OneRank(), Turns(1)], ids=["one rank", "turns"])
def test_a_sleep_ends_when_its_time_is_up_and_when_another_thread_wakes_it(
    order: RankOrder,
) -> None:
    def wake() -> None:
        with order.lock:
            order.wake(0, [sleeper])

    with entered(order):
        sleeper = threading.get_ident()
        with order.lock:
            start_s = time.monotonic()
            order.sleep(0, 0.05)
            order.resume(0)
            assert 0.05 <= time.monotonic() - start_s < 5
            threading.Thread(target=wake).start()  # it waits for the lock
            order.sleep(0, 20)
            order.resume(0)
        assert time.monotonic() - start_s < 10
        order.yield_turn(0)
    if isinstance(order, Turns):
        order.close()


def test_a_rank_alone_has_the_clock_of_the_process_and_no_turn() -> None:
    order = OneRank()
    before = running_s()
    first = order.clock(0)
    order.advance_clock(0, before + 1000)
    assert before <= first <= order.clock(0) < before + 500
    assert not order.takes_turns
    assert order.idle_s() == 0
    assert not order.is_next(0)
    assert order.not_running(0) is None


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
