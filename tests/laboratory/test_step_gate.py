"""The gate holds ranks until they are let on, opened for good, or ended."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import echelon as ec
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.errors import StateError
from echelon.laboratory.step_gate import StepGate
from echelon.launch.run import enter
from echelon.launch.simulated_ranks import SimulatedRanks


def gated(fn: Any) -> tuple[SimulatedRanks, StepGate]:
    """Two ranks with a gate."""
    world = ThreadWorld(2, 10.0)
    gate = StepGate(world, 100)
    world.watch = gate
    return SimulatedRanks(fn, world, (), torch.device("cpu"), enter), gate


def follow(simulated: SimulatedRanks, gate: StepGate) -> None:
    """Run to the next call."""
    simulated.follow(lambda: gate.call is not None, lambda _, seconds: gate.wait(seconds))


def three_calls(world: ec.World) -> int:
    """Communicate three times."""
    for _ in range(3):
        world.group.barrier()
    return world.rank


def test_ranks_are_held_until_they_are_let_on() -> None:
    simulated, gate = gated(three_calls)
    with simulated:
        for number in (1, 2, 3):
            gate.let_on()
            follow(simulated, gate)
            assert gate.call is not None
            assert gate.call.number == number
        gate.let_on()
        follow(simulated, gate)
        assert gate.call is None
    assert simulated.results == [0, 1]


def test_an_open_gate_holds_nobody() -> None:
    simulated, gate = gated(three_calls)
    with simulated:
        follow(simulated, gate)
        gate.open()
        follow(simulated, gate)
    assert simulated.results == [0, 1]


def test_ranks_that_are_ended_hear_of_it_in_the_call_and_not_later() -> None:
    heard: list[str] = []

    def main(world: ec.World) -> None:
        try:
            world.group.barrier()
        except ec.RankFailed as error:
            heard.append(error.cause)
            raise

    simulated, gate = gated(main)
    with simulated:
        follow(simulated, gate)
        gate.end(StateError("enough"))
        assert simulated.left_behind() == []
    assert heard == ["raised StateError: enough"] * 2


def test_calls_of_two_threads_of_a_rank_come_one_after_the_other() -> None:
    def main(world: ec.World) -> None:
        groups = [world.group.subgroup([0, 1]) for _ in range(2)]
        threads = [threading.Thread(target=group.barrier) for group in groups if group is not None]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    calls = [(call.number, call.op, call.group) for call in ec.step_through(main, 2)]
    assert [number for number, _, _ in calls] == [1, 2, 3, 4]
    assert {group for _, op, group in calls if op == "barrier"} == {"world.1", "world.2"}


def test_a_failed_rank_ends_the_wait_for_the_next_call() -> None:
    def main(world: ec.World) -> None:
        raise ValueError("early")

    simulated, gate = gated(main)
    with simulated, pytest.raises(ValueError, match="early"):
        follow(simulated, gate)


def test_an_exchange_of_objects_is_one_call_in_which_objects_are_read() -> None:
    def main(world: ec.World) -> None:
        world.group.all_gather_object({"rank": world.rank})
        world.group.broadcast_object("text" if world.rank == 1 else None, src=1)
        world.group.all_gather_bytes(b"123")

    gathered, sent, of_bytes = ec.step_through(main, 2)
    assert gathered.before[1].objects == ("{'rank': 1}",)
    assert gathered.after[0].objects == ("{'rank': 0}", "{'rank': 1}")
    assert list(sent.before) == [1]
    assert sent.after[0].objects == ("'text'",)
    assert of_bytes.after[0].values.tolist() == [49, 50, 51] * 2


def test_bytes_of_a_user_under_the_label_of_objects_are_bytes() -> None:
    def main(world: ec.World) -> None:
        data = torch.full((4,), world.rank, dtype=torch.uint8)
        world.group.all_reduce(data, "max", label="objects")

    (call,) = ec.step_through(main, 2)
    assert call.after[0].values.tolist() == [1, 1, 1, 1]
    assert call.before[1].objects == ()
