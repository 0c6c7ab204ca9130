import time
from typing import Any

import torch

import echelon as ec
from echelon import events
from echelon.observe import CommMeter, CommTotal


def measure(ranks: int, body: Any) -> list[dict[str, CommTotal]]:
    """What each rank communicated in ``body(world)``."""

    def main(world: ec.World) -> dict[str, CommTotal]:
        meter = CommMeter(world.rank)
        with events.listen(meter):
            body(world)
        return meter.totals

    return ec.run(main, ranks)


def test_calls_and_bytes_are_counted_per_operation_and_rank() -> None:
    def body(world: ec.World) -> None:
        for _ in range(3):
            world.group.all_reduce(torch.zeros(10))
        world.group.broadcast(torch.zeros(5, dtype=torch.float64), src=0)

    for totals in measure(2, body):
        assert (totals["all_reduce"].calls, totals["all_reduce"].nbytes) == (3, 120)
        assert (totals["broadcast"].calls, totals["broadcast"].nbytes) == (1, 40)


def test_the_rank_that_comes_first_is_the_one_that_waits() -> None:
    def body(world: ec.World) -> None:
        if world.rank == 1:
            time.sleep(0.2)
        world.group.barrier()

    early, late = measure(2, body)
    assert early["barrier"].wait_s > 0.15
    assert late["barrier"].wait_s < early["barrier"].wait_s


def test_messages_between_two_ranks_are_counted() -> None:
    def body(world: ec.World) -> None:
        if world.rank == 0:
            world.group.send(torch.zeros(4), dst=1)
        else:
            world.group.recv(torch.zeros(4), src=0)

    sender, receiver = measure(2, body)
    assert sender["send"].nbytes == receiver["recv"].nbytes == 16


def test_making_groups_and_windows_is_no_communication() -> None:
    def body(world: ec.World) -> None:
        world.group.window(10)
        world.group.subgroup([0, 1])
        world.group.barrier()

    assert [list(totals) for totals in measure(2, body)] == [["barrier"], ["barrier"]]
