"""Clocks of ranks: when they run, and what counts as idle."""

import time

import pytest

from echelon.comm.threads.clocks import Clocks
from echelon.comm.threads.running_time import stopped_time


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The nanoseconds of the machine, as the only item."""
    nanoseconds = [100]
    monkeypatch.setattr(time, "monotonic_ns", lambda: nanoseconds[0])
    return nanoseconds


def test_the_clock_of_a_rank_runs_between_start_and_stop(now: list[int]) -> None:
    clocks = Clocks(2)
    clocks.start(1, clocks.read())
    now[0] += 5
    clocks.start(1, clocks.read())  # it runs already
    assert [clocks.read(0), clocks.read(1)] == [0, 5]
    clocks.stop(1)
    now[0] += 3
    assert clocks.read(1) == 5
    clocks.advance(0, 5)
    clocks.advance(1, 4)
    assert [clocks.read(0), clocks.read(1)] == [5, 5]


def test_no_clock_runs_until_all_have_let_go(now: list[int]) -> None:
    clocks = Clocks(1)
    clocks.start(0, clocks.read())
    world = clocks.read()
    clocks.hold()
    clocks.hold()
    now[0] += 5
    clocks.let_go()
    now[0] += 5
    assert [clocks.read(0), clocks.read()] == [0, world]
    clocks.let_go()
    now[0] += 2
    with stopped_time():
        now[0] += 20
        assert [clocks.read(0), clocks.read()] == [2, world + 2]


def test_the_world_is_idle_while_no_rank_has_the_turn_and_no_clock_runs(now: list[int]) -> None:
    clocks = Clocks(2)
    clocks.note_turn(is_free=True)
    now[0] += 1
    assert clocks.idle_ns() == 1
    clocks.start(0, clocks.read())  # it blocks in Python
    now[0] += 10
    clocks.stop(0)
    now[0] += 2
    clocks.note_turn(is_free=False)
    now[0] += 20
    assert clocks.idle_ns() == 3
