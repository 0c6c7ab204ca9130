"""A monitored barrier names the ranks that do not come."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import echelon as ec
from echelon.c10d.monitored_barrier import MonitoredBarrierError
from echelon.c10d.simulated_rank import require_world_group
from echelon.comm.threads.running_time import stopped_time
from echelon.errors import DeadlockError

SHORT = timedelta(milliseconds=100)


def passes_twice(world: ec.World) -> str:
    dist.init_process_group("gloo")
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True)
    return "passed"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_all_ranks_pass(kind: str) -> None:
    assert ec.run(passes_twice, 3, kind) == ["passed"] * 3


def lacks_ranks(
    world: ec.World, absent: list[int], wait_all: bool, timeout: timedelta | None = SHORT
) -> str:
    dist.init_process_group("gloo")
    if world.rank not in absent:
        with pytest.raises(MonitoredBarrierError) as caught:
            dist.monitored_barrier(timeout=timeout, wait_all_ranks=wait_all)
        assert isinstance(caught.value, RuntimeError)
        return str(caught.value)
    return ""


def test_rank_0_names_the_first_rank_that_does_not_come_and_the_others_hear_of_it() -> None:
    first, second, *_ = ec.run(lacks_ranks, 4, args=([2, 3], False))
    assert first == "Rank 2 failed to pass monitoredBarrier in 100 ms"
    assert "Rank 1 successfully reached monitoredBarrier, but" in second
    assert first in second


def test_rank_0_names_all_ranks_that_do_not_come_if_it_is_told_to_wait_for_all() -> None:
    first, *_ = ec.run(lacks_ranks, 4, args=([1, 3], True))
    assert first == "Ranks 1, 3 failed to pass monitoredBarrier in 100 ms"


def test_the_others_do_not_wait_for_ever_if_rank_0_does_not_come() -> None:
    _, second = ec.run(lacks_ranks, 2, args=([0], False))
    assert second.endswith("from rank 0: nothing came from it in 200 ms")


def test_simulated_ranks_without_a_timeout_are_told_at_once_which_ranks_have_ended() -> None:
    with pytest.raises(DeadlockError) as caught:
        ec.run(lacks_ranks, 4, args=([1, 3], True, None))
    assert {*caught.value.waits} == {0, 2}
    assert "monitored_barrier" in caught.value.waits[2][0]
    assert {*caught.value.last_calls} == {1, 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("absent", "start", "why"),
    [
        ([1, 2], "Ranks 1, 2 failed to pass monitoredBarrier: ", "rank 1 returned and left"),
        ([0], "Rank 1 successfully reached monitoredBarrier, but ", "rank 0 returned and left"),
    ],
)
def test_processes_without_a_timeout_are_told_soon_which_ranks_have_ended(
    absent: list[int], start: str, why: str
) -> None:
    told = next(filter(None, ec.run(lacks_ranks, 3, "processes", args=(absent, True, None))))
    assert told.startswith(start)
    assert f"{why} the world, while this rank was in monitored_barrier" in told


def comes_late(world: ec.World) -> str:
    dist.init_process_group("gloo")
    dist.group.WORLD.set_timeout(SHORT)
    if world.rank == 1:
        time.sleep(5 * SHORT.total_seconds())
    with pytest.raises(MonitoredBarrierError) as caught:
        dist.monitored_barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=30))
    dist.monitored_barrier()
    return str(caught.value)


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.slow)])
def test_without_a_timeout_that_of_the_group_holds_and_the_next_barrier_is_passed(
    kind: str,
) -> None:
    first, second = ec.run(comes_late, 2, kind)
    assert first.startswith("Rank 1 failed to pass monitoredBarrier: monitored_barrier")
    assert "waited 0.1 s for rank 1 in vain" in first
    assert first in second


def stops_in_a_debugger(world: ec.World) -> str:
    """Rank 1 comes late, because of a debugger, and rank 2 when rank 0 has seen rank 1."""
    dist.init_process_group("gloo")
    if world.rank > 0:
        world.group.recv(torch.empty(1), world.rank - 1)
    if world.rank == 1:
        with stopped_time():
            time.sleep(1.5 * SHORT.total_seconds())
    if world.rank == 2:
        require_world_group().thread_world.order.yield_turn(2)
    sent = [world.group.isend(torch.ones(1), world.rank + 1)] if world.rank < 2 else []
    dist.monitored_barrier(timeout=SHORT)
    for work in sent:
        work.wait()
    return "passed"


def test_no_rank_is_late_because_a_debugger_has_stopped_the_ranks() -> None:
    assert ec.run(stops_in_a_debugger, 3) == ["passed"] * 3
