"""Threads as ranks: followed to their end or to where they are held, and never left."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.launch.run import enter
from echelon.launch.simulated_ranks import SimulatedRanks
from echelon.process import time_limits


def simulated(fn: Any, *args: object) -> SimulatedRanks:
    """Two ranks in turns."""
    world = ThreadWorld(2, 10.0)
    return SimulatedRanks(fn, world, args, torch.device("cpu"), enter)


def test_ranks_are_called_with_their_world_and_the_arguments() -> None:
    with simulated(lambda world, a, b: (world.rank, a, b), 5, 6) as ranks:
        assert ranks.threads == []
        ranks.follow()
        assert ranks.results == [(0, 5, 6), (1, 5, 6)]
        assert ranks.left_behind() == []


def test_a_caller_may_stop_to_follow_and_come_back() -> None:
    passes = threading.Event()

    def main(world: ec.World) -> int:
        while not passes.wait(0.01):
            pass
        return world.rank

    with simulated(main) as ranks:
        stops = iter([False, True])
        ranks.follow(lambda: next(stops), lambda thread, seconds: None)
        assert ranks.results == [None, None]
        assert len([thread for thread in ranks.threads if thread.is_alive()]) == 2
        passes.set()
        ranks.follow()
    assert ranks.results == [0, 1]


def test_the_first_failure_is_raised_and_names_the_rank() -> None:
    def main(world: ec.World) -> None:
        if world.rank == 1:
            raise KeyError("boom")
        world.group.barrier()

    with simulated(main) as ranks, pytest.raises(KeyError) as raised:
        ranks.follow()
    assert raised.value.__notes__ == ["raised on rank 1 of 2"]


@pytest.mark.slow
def test_a_rank_that_does_not_end_in_its_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "NOTICE_IN_THREADS_S", 0.2)
    ends = threading.Event()

    def main(world: ec.World) -> None:
        if world.rank == 1:
            raise KeyError("boom")
        ends.wait(20)

    start_s = time.monotonic()
    with simulated(main) as ranks:
        with pytest.raises(KeyError) as raised:
            ranks.follow()
        assert "left behind: rank 0" in raised.value.__notes__[-1]
        assert ranks.left_behind() == ["rank 0"]
        ends.set()
        ranks.threads[0].join(10)
    assert time.monotonic() - start_s < 10
