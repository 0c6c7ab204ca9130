"""What the user sees when something is wrong: our errors, wherever c10d lets them through."""

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _abort_process_group

import echelon as ec
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def aborts_while_others_wait(world: ec.World, call: str) -> str:
    dist.init_process_group("gloo")
    group = dist.new_group()
    if world.rank == 1:
        dist.barrier()
        _abort_process_group(group)
        dist.barrier()  # the abort is of one group: others work on
        return "aborted"
    value = torch.zeros(1)
    issue = {
        "barrier": lambda: dist.barrier(group, async_op=True),
        "all_reduce": lambda: dist.all_reduce(value, group=group, async_op=True),
        "irecv": lambda: dist.irecv(value, 1, group=group),
        "receive from any": lambda: dist.irecv(value, group=group),
    }[call]
    work = issue()
    dist.barrier()
    told = refused(work.wait)
    later = refused(lambda: dist.all_reduce(value, group=group))
    dist.barrier()
    return f"{told} {later}"


@pytest.mark.parametrize("call", ["barrier", "all_reduce", "irecv", "receive from any"])
def test_an_abort_by_a_simulated_rank_frees_the_others_at_once(call: str) -> None:
    freed = "RankFailed RankFailed"
    start_s = time.monotonic()
    assert ec.run(aborts_while_others_wait, 3, args=(call,)) == [freed, "aborted", freed]
    assert time.monotonic() - start_s < 30  # the group waits for 30 minutes


def waits_for_one_that_aborts(world: ec.World) -> None:
    dist.init_process_group("gloo")
    if world.rank == 1:
        _abort_process_group()
        return
    dist.all_reduce(torch.zeros(1))


def test_the_error_of_an_abort_names_the_rank_and_the_group() -> None:
    sentence = "rank 1 aborted its process group, while this rank was in .*of group"
    with pytest.raises(ec.errors.RankFailed, match=sentence):
        ec.run(waits_for_one_that_aborts, 2)


def give_nonsense(rank: int, size: int) -> list[str]:
    tensor = torch.zeros(3)
    calls = [
        lambda: dist.all_reduce(tensor, ReduceOp.BAND),
        lambda: dist.all_reduce(torch.zeros(3, dtype=torch.bool), ReduceOp.AVG),
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
