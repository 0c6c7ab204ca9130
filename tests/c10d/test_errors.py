"""What the user sees when something is wrong: our errors, wherever c10d lets them through."""

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _abort_process_group

from echelon.errors import CollectiveMismatch, UnsupportedError
from tests.c10d.ranks import Ranks


def refused(call: Callable[[], object]) -> str:
    """The class of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__
    return "nothing"


def disagree(rank: int, size: int) -> None:
    group = dist.new_group()
    dist.all_reduce(torch.zeros(3 if rank == 1 else 2), group=group)


@pytest.mark.slow
def test_a_mismatch_reaches_every_rank_as_our_error_with_all_calls(ranks: Ranks) -> None:
    with pytest.raises(
        CollectiveMismatch, match=r"rank 1: all_reduce\(sum\) float32\[3\].*<-- differs"
    ):
        ranks.call(disagree)


def names_of_mismatch(rank: int, size: int) -> list[object]:
    group = dist.new_group()
    wait = dist.all_reduce(torch.zeros(3 if rank == 1 else 2), group=group, async_op=True).wait
    group = dist.new_group()
    work = dist.all_reduce(torch.zeros(3 if rank == 1 else 2), group=group, async_op=True)
    future = work.get_future()
    try:
        future.wait()
    except RuntimeError as error:
        told = "CollectiveMismatch" in str(error) and "<-- differs" in str(error)
    return [refused(wait), told, type(work.exception()).__name__, work.is_success()]


def test_a_mismatch_of_asynchronous_calls_is_told_by_wait_by_the_future_and_by_the_work(
    ranks: Ranks,
) -> None:
    wanted = ["CollectiveMismatch", True, "CollectiveMismatch", False]
    assert ranks.call(names_of_mismatch) == [wanted] * 4


def come_too_late(rank: int, size: int) -> str:
    short = dist.new_group(timeout=timedelta(seconds=0.2))
    long = dist.new_group()
    if rank == 0:
        return "late"
    told = [
        refused(lambda: dist.barrier(short)),
        refused(lambda: dist.barrier(long, async_op=True).wait(timedelta(seconds=0.2))),
        refused(lambda: dist.irecv(torch.zeros(1), 0, group=long).wait(timedelta(seconds=0.1))),
        refused(lambda: dist.irecv(torch.zeros(1), group=long).wait(timedelta(seconds=0.1))),
    ]
    return " ".join(told)


def test_timeouts_of_groups_and_of_waits_are_kept(ranks: Ranks) -> None:
    assert ranks.call(come_too_late) == ["late"] + [" ".join(["CommTimeout"] * 4)] * 3


def one_aborts(rank: int, size: int) -> str:
    group = dist.new_group()
    if rank == 2:
        _abort_process_group(group)
        return "aborted"
    return refused(lambda: dist.barrier(group))


def test_an_abort_frees_the_ranks_that_wait(ranks: Ranks) -> None:
    assert ranks.call(one_aborts) == ["RankFailed", "RankFailed", "aborted", "RankFailed"]


def give_sparse(rank: int, size: int) -> None:
    dist.all_reduce(torch.eye(3).to_sparse())


def train_sparse(rank: int, size: int) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(8, 2, sparse=True))
    model(torch.tensor([rank])).sum().backward()


@pytest.mark.parametrize("call", [give_sparse, train_sparse])
def test_sparse_tensors_are_refused_with_what_to_do(
    ranks: Ranks, call: Callable[[int, int], None]
) -> None:
    with pytest.raises(UnsupportedError, match=r"sparse_coo.*\.to_dense\(\).*sparse=True"):
        ranks.call(call)


def give_nonsense(rank: int, size: int) -> list[str]:
    tensor = torch.zeros(3)
    calls = [
        lambda: dist.all_reduce(tensor, ReduceOp.BAND),
        lambda: dist.all_reduce(torch.zeros(3, dtype=torch.int64), ReduceOp.AVG),
        lambda: dist.all_gather_into_tensor(torch.zeros(5), tensor),
        lambda: dist.reduce_scatter(tensor, [tensor]),
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1, 1, 2], [1] * 4),
    ]
    return [refused(call) for call in calls]


def test_calls_without_meaning_are_refused_on_the_spot(ranks: Ranks) -> None:
    assert ranks.call(give_nonsense) == [["ArgumentError"] * 5] * 4


def ask_for_cuda(rank: int, size: int) -> None:
    dist.group.WORLD._get_backend(torch.device("cuda"))


def test_other_devices_are_refused_with_the_class_that_c10d_expects(ranks: Ranks) -> None:
    with pytest.raises(UnsupportedError, match="tensors on cpu, not on cuda") as caught:
        ranks.call(ask_for_cuda)
    assert isinstance(caught.value, RuntimeError)
