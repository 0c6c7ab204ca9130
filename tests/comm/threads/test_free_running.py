"""Ranks that run at the same time."""

from __future__ import annotations

import threading
import time

import torch

import echelon as ec
from echelon.comm.threads.free_running import FreeRunning


def test_all_ranks_run_at_once_with_a_random_stream_each() -> None:
    meeting = threading.Barrier(4)

    def main(world: ec.World) -> float:
        torch.manual_seed(world.rank)
        meeting.wait(20)
        value = torch.rand(1).item()
        meeting.wait(20)
        return value

    expected = [torch.rand(1, generator=torch.Generator().manual_seed(r)).item() for r in range(4)]
    assert ec.run(main, 4, concurrent=True) == expected


def test_there_is_one_clock_and_no_turn() -> None:
    order = FreeRunning(2)
    before = time.monotonic()
    assert before <= order.clock(0) <= order.clock(1)
    order.meet(0, before + 1000)
    assert order.clock(0) < before + 500
    assert order.idle_s() == 0
    assert not order.is_next(1)
    assert order.long_turn(0.0) is None
