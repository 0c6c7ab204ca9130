"""Works of c10d on the backend ``echelon``: waits, polls, futures, receives from any rank."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.c10d.ranks import Ranks


def wait_in_reverse(rank: int, size: int) -> None:
    total = sum(range(1, size + 1))
    tensors = [torch.full((1000,), float((rank + 1) * i)) for i in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work, i in reversed(list(zip(works, range(30), strict=True))):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result()[0] is tensors[i]
        assert torch.equal(tensors[i], torch.full((1000,), float(total * i)))


@pytest.mark.slow
def test_many_works_may_be_outstanding_and_waited_for_in_any_order(ranks: Ranks) -> None:
    ranks.call(wait_in_reverse)


def poll_without_waiting(rank: int, size: int) -> None:
    transposed = torch.full((3, 4), float(rank)).t()  # is copied back when the work is complete
    works = [dist.all_reduce(transposed, async_op=True), dist.barrier(async_op=True)]
    while not all(work.is_completed() for work in works):
        time.sleep(0.001)
    assert torch.equal(transposed, torch.full((4, 3), float(sum(range(size)))))


def test_a_work_that_says_it_is_complete_needs_no_wait(ranks: Ranks) -> None:
    ranks.call(poll_without_waiting)


def chain_futures(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(0.05)  # the futures of the others are not fulfilled when they are asked for
    futures = [
        dist.all_reduce(torch.full((5,), float(i * rank)), async_op=True).get_future()
        for i in range(4)
    ]
    halves = [future.then(lambda f: f.value()[0] / 2) for future in futures]
    for i, half in enumerate(torch.futures.wait_all(halves)):
        assert torch.equal(half, torch.full((5,), i * sum(range(size)) / 2))
    assert torch.equal(
        dist.barrier(async_op=True).get_future().then(lambda _: torch.ones(1)).wait(), torch.ones(1)
    )


def test_futures_are_fulfilled_without_a_wait(ranks: Ranks) -> None:
    ranks.call(chain_futures)


def sum_again_in_a_callback(rank: int, size: int) -> None:
    if rank == 1:
        time.sleep(0.2)  # so that the futures of the others are not fulfilled yet
    future = dist.all_reduce(torch.ones(5), async_op=True).get_future()
    if rank != 1:
        last = future.then(lambda f: dist.all_reduce(f.value()[0]))
        with pytest.raises(RuntimeError, match="a callback of a future issued all_reduce of group"):
            last.wait()
    future.wait()
    dist.barrier()


def test_a_collective_in_a_callback_of_a_future_is_refused(ranks: Ranks) -> None:
    ranks.call(sum_again_in_a_callback)


def receive_from_any(rank: int, size: int) -> None:
    if rank > 0:
        time.sleep(0.02 * rank)
        dist.send(torch.full((4,), float(rank)), 0, tag=5)
        dist.send(torch.full((2,), -1.0), 0, tag=6)
        return
    sources = []
    for _ in range(1, size):
        tensor = torch.empty(4)
        work = dist.irecv(tensor, tag=5)
        work.wait()
        assert (tensor == work._source_rank()).all()
        sources.append(work._source_rank())
    assert sorted(sources) == [1, 2, 3]
    assert sorted(dist.recv(torch.empty(2), tag=6) for _ in range(1, size)) == [1, 2, 3]


def test_a_receive_from_any_rank_tells_which_one_sent(ranks: Ranks) -> None:
    ranks.call(receive_from_any)
