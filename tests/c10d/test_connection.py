"""How ranks of a process group meet, and receive from any of them."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import echelon as ec
from tests.comm.threads.test_turns import work_for


def splits_the_job(world: ec.World) -> tuple[int, int, int]:
    half, rank = divmod(world.rank, 2)
    store = dist.TCPStore("half", 1000 + half)
    dist.init_process_group("gloo", store=store, rank=1 - rank, world_size=2)  # in reverse order
    total = torch.tensor([world.rank])
    dist.all_reduce(total)
    gathered = [torch.tensor([0]), torch.tensor([0])]
    dist.all_gather(gathered, torch.tensor([world.rank]))
    return int(total), int(gathered[0]), int(gathered[1])


def test_disjoint_groups_of_one_name_have_their_own_ranks_in_any_order() -> None:
    assert ec.run(splits_the_job, 4) == [(1, 1, 0), (1, 1, 0), (5, 3, 2), (5, 3, 2)]


def comes_again(world: ec.World) -> list[int]:
    totals = []
    for number in range(3):
        dist.init_process_group("gloo")
        total = torch.tensor([number + dist.get_rank()])
        dist.all_reduce(total)
        totals.append(int(total))
        dist.destroy_process_group()
    return totals


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_job_may_leave_its_group_and_make_it_again(kind: str) -> None:
    assert ec.run(comes_again, 2, kind) == [[1, 3, 5]] * 2


def sleeps_after_a_new_group(world: ec.World) -> None:
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    if world.rank == 1:
        time.sleep(1)
    dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.slow
def test_the_last_call_of_a_late_rank_is_the_one_that_its_line_has() -> None:
    with pytest.raises(ec.CommTimeout, match=r"its last call: new_group \[0, 1\]"):
        ec.run(sleeps_after_a_new_group, 2)


def makes_a_world(timeout: timedelta) -> None:
    dist.init_process_group("gloo", timeout=timeout)


def makes_a_group(timeout: timedelta) -> None:
    dist.init_process_group("gloo")
    dist.new_group([0, 1], timeout=timeout)


@pytest.mark.parametrize("make", [makes_a_world, makes_a_group])
def test_a_rank_that_computes_on_when_a_group_is_made_is_named_after_its_timeout(make) -> None:
    def main(world: ec.World) -> None:
        make(timedelta(seconds=0.3))
        if world.rank == 1:  # the last that came, so the other one has no turn
            work_for(1.0)

    with pytest.raises(ec.CommTimeout, match=r"waited 0\.3 s for rank 1 in vain"):
        ec.run(main, 2)


def stays_away(world: ec.World) -> None:
    if world.rank == 2:
        return
    dist.init_process_group("gloo")


def test_a_rank_that_does_not_come_is_a_deadlock_with_the_lines_of_the_others() -> None:
    start_s = time.monotonic()
    with pytest.raises(ec.DeadlockError) as caught:
        ec.run(stays_away, 3)
    assert time.monotonic() - start_s < 30.0  # its timeout is 300 s
    text = str(caught.value)
    assert "rank 0 waits in init_process_group" in text
    assert "in stays_away" in text
    assert "rank 2 returned already" in text


def given_a_store(world: ec.World, store: dist.Store) -> int:
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    total = torch.tensor([1])
    dist.all_reduce(total)
    return int(total)


def test_a_store_of_torch_from_outside_can_be_used() -> None:
    assert ec.run(given_a_store, 3, args=(dist.HashStore(),)) == [3, 3, 3]


def receives_from_any(world: ec.World) -> list[tuple[int | None, float]]:
    dist.init_process_group("gloo")
    received = []
    tensor = torch.zeros(1)
    if world.rank == 0:
        for _ in range(2):
            source = dist.recv(tensor, tag=7)
            received.append((source, tensor.item()))
        work = dist.irecv(tensor, tag=8)
        while not work.is_completed():  # hands on the turn
            time.sleep(0)
        received.append((work._source_rank(), tensor.item()))
    else:
        dist.send(torch.tensor([float(world.rank)]), 0, tag=7)
        if world.rank == 1:
            dist.send(torch.tensor([10.0]), 0, tag=8)
    return received


def test_a_message_from_any_rank_says_from_which() -> None:
    received, *_ = ec.run(receives_from_any, 3)
    assert sorted(received[:2]) == [(1, 1.0), (2, 2.0)]
    assert received[2] == (1, 10.0)


def receives_nothing(world: ec.World) -> None:
    dist.init_process_group("gloo")
    if world.rank == 0:
        dist.recv(torch.zeros(1))
    dist.barrier()


def test_a_message_that_nobody_will_send_is_a_deadlock() -> None:
    with pytest.raises(ec.DeadlockError, match=r"rank 0 waits in recv .* from any rank"):
        ec.run(receives_nothing, 2)


def waits_then_goes_on(world: ec.World) -> str:
    dist.init_process_group("gloo")
    text = ""
    if world.rank == 0:
        work = dist.barrier(async_op=True)
        with pytest.raises(TimeoutError) as caught:
            work.wait(timedelta(milliseconds=50))
        text = str(caught.value)
        dist.TCPStore("host", 1).set("waited", "")
        work.wait()
    else:
        dist.TCPStore("host", 1).wait(["waited"])
        dist.barrier()
    return text


def test_a_call_with_a_limit_of_its_own_ends_in_time_and_its_rank_goes_on() -> None:
    first, _ = ec.run(waits_then_goes_on, 2)
    assert "waited 0.1 s for rank 1" in first
