"""Checks of groups over gloo (our algorithms) and over an engine's collectives, as NCCL is used.

What every group promises is in ``tests/comm/test_group.py``. Here is what depends on c10d: lengths
in one round and in pieces, an engine's dtypes, progress beside the caller, tags, subgroups.
"""

import sys
import time
from functools import cache

import pytest
import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.reduce_op import OPS
from echelon.comm.torch_dist.group import PeerGroup
from echelon.errors import ArgumentError, CommTimeout, UnsupportedError
from tests.comm import collective_checks, dtype_checks, order_checks
from tests.comm.checking import Outcome, bits, checks_of, outcome_of
from tests.comm.dtype_checks import EVERY, NARROW, has_meaning

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOAT8 = NARROW[2:]
LENGTHS = (1, 7, 1000, 300_001, 2_500_003)


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What ``rank`` brings: known to all ranks, different on each."""
    pattern = torch.arange(numel).mul_(2 * rank + 3 * seed + 1).remainder_(61)
    if dtype.is_complex:
        return torch.complex(pattern / 7 - 4, pattern / 11).to(dtype)
    if dtype.is_floating_point:
        return (pattern / 7 - 4).to(dtype)  # sums of these depend on their order
    return pattern.remainder(2).to(dtype) if dtype == torch.bool else pattern.to(dtype)


def everyone(
    group: Group, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """What all ranks bring, in rank order."""
    return [values(rank, numel, dtype, seed) for rank in range(group.size)]


def total(parts: list[Tensor], op: str) -> Tensor:
    """The reduction in rank order, narrow floats in float32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in NARROW else torch.int64 if dtype in UNSIGNED else dtype
    combine = {
        "sum": torch.add, "mean": torch.add, "product": torch.mul, "min": torch.minimum,
        "max": torch.maximum, "band": torch.bitwise_and, "bor": torch.bitwise_or,
        "bxor": torch.bitwise_xor,
    }[op]  # fmt: skip
    result = parts[0].to(wide)
    for part in parts[1:]:
        result = combine(result, part.to(wide))
    if op == "mean":
        result = result / len(parts)
    return result.to(dtype)


def assert_reduced(group: Group, result: Tensor, expected: Tensor) -> None:
    """Bitwise with our algorithms; an engine sums in its own order and precision."""
    ours = isinstance(group, PeerGroup) or result.dtype in FLOAT8
    if ours or not result.dtype.is_floating_point:
        if result.is_complex() and not isinstance(group, PeerGroup):
            torch.testing.assert_close(result, expected)
        else:
            assert torch.equal(bits(result), bits(expected))
    else:
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2, check_dtype=True)


def check_every_dtype_is_reduced_by_every_operation_that_has_a_meaning(group: Group) -> None:
    for dtype in EVERY:
        for op in OPS:
            if (op in ("min", "max") and dtype in FLOAT8) or (dtype in UNSIGNED and "b" in op):
                continue  # torch has no such operation to compare with
            if not has_meaning(op, dtype):
                continue
            parts = everyone(group, 13, dtype)
            tensor = parts[group.rank].clone()
            group.all_reduce(tensor, op)
            assert_reduced(group, tensor, total(parts, op))


def check_reductions_of_all_lengths_run_in_rank_order(group: Group) -> None:
    for numel in LENGTHS:
        for dtype in (torch.float32, torch.bfloat16)[: 1 if numel > 10**6 else 2]:
            parts = everyone(group, numel, dtype, seed=numel)
            tensor = parts[group.rank].clone()
            group.all_reduce(tensor, "mean")
            assert_reduced(group, tensor, total(parts, "mean"))


def check_a_reduce_scatter_leaves_each_rank_its_part(group: Group) -> None:
    for numel in (0, 3, 400_001):
        for dtype in (torch.float32, torch.float16, torch.int16, torch.complex64):
            parts = everyone(group, group.size * numel, dtype, seed=1)
            output = torch.empty(numel, dtype=dtype)
            source = parts[group.rank].clone()
            group.reduce_scatter_single(output, source)
            expected = total(parts, "sum")[group.rank * numel : (group.rank + 1) * numel]
            assert_reduced(group, output, expected)
            assert torch.equal(source, parts[group.rank])
    lengths = [3, *[1_500_001] * (group.size - 1)]  # all go one way, in pieces
    parts, output = everyone(group, sum(lengths), seed=2), torch.empty(lengths[group.rank])
    group.reduce_scatter_single(output, parts[group.rank].clone(), splits=lengths)
    assert_reduced(group, output, total(parts, "sum").split(lengths)[group.rank])


def check_a_long_broadcast_comes_from_any_source(group: Group) -> None:
    for src in range(group.size):
        tensor = values(group.rank, 700_003, seed=src)
        group.broadcast(tensor, src)
        assert torch.equal(tensor, values(src, 700_003, seed=src))


def check_a_reduce_changes_the_destination_only(group: Group) -> None:
    for numel in (5, 1_200_000):
        parts = everyone(group, numel)
        tensor = parts[group.rank].clone()
        group.reduce(tensor, dst=1, op="mean")
        if group.rank == 1:
            assert_reduced(group, tensor, total(parts, "mean"))
        else:
            assert torch.equal(tensor, parts[group.rank])


def check_a_collective_proceeds_while_its_caller_computes(group: Group) -> None:
    tensor = values(group.rank, 200_000)
    work = group.all_reduce(tensor, async_op=True)
    assert work is not None
    end = time.monotonic() + 10
    while not work.done() and time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)
    assert work.done()
    work.wait()


def check_a_wait_may_time_out_and_be_repeated(group: Group) -> None:
    if not isinstance(group, PeerGroup) and group._agreement is not None:
        return  # the calls are compared before an engine gets one, so the issue waits already
    if group.rank == 0:
        time.sleep(0.4)
    tensor = torch.ones(2)
    work = group.all_reduce(tensor, async_op=True)
    assert work is not None
    if group.rank == 1:
        with pytest.raises(CommTimeout, match=r"waited 0\.1 s for rank") as info:
            work.wait(timeout=0.1)
        assert 0 in info.value.missing
    work.wait()
    assert tensor.tolist() == [group.size] * 2


def check_tags_have_sixteen_bits(group: Group) -> None:
    if not isinstance(group, PeerGroup):
        return  # NCCL has no tags, so an engine's messages match in the order of issue
    if group.rank == 0:
        group.send(torch.full((3,), 7.0), 1, tag=65535)
    elif group.rank == 1:
        tensor = torch.empty(3)
        group.recv(tensor, 0, tag=65535)
        assert tensor.tolist() == [7.0] * 3
    with pytest.raises(ArgumentError, match="tag 65536"):
        group.isend(torch.ones(1), 1 - min(group.rank, 1), tag=65536)


def check_a_message_may_be_asked_for_and_time_out(group: Group) -> None:
    if not isinstance(group, PeerGroup):
        return
    if group.rank == 1:
        tensor = torch.empty(2)
        work = group.irecv(tensor, 0, tag=9)
        assert not work.done()
        with pytest.raises(CommTimeout, match="recv float32"):
            work.wait(timeout=0.05)
        group.send(torch.ones(1), 0, tag=8)
        work.wait(timeout=10.0)
        assert work.done()
        assert tensor.tolist() == [5.0, 5.0]
    elif group.rank == 0:
        group.recv(torch.empty(1), 1, tag=8)
        group.send(torch.full((2,), 5.0), 1, tag=9)


def check_subgroups_of_subgroups_need_their_own_ranks_only(group: Group) -> None:
    size = group.size
    pairs = [group.subgroup([0, other]) for other in range(1, size)]  # rank 0 is in all of them
    for other, pair in enumerate(pairs, start=1):
        if pair is None:
            assert group.rank not in (0, other)
            continue
        assert pair.ranks == (0, other)
        inner = pair.subgroup([1])  # the other ranks of the job do not know of it
        assert (inner is not None) == (group.rank == other)
        tensor = torch.tensor([float(group.rank)])
        pair.all_reduce(tensor)
        assert tensor.item() == other
    group.barrier()


def check_a_window_is_local_memory(group: Group) -> None:
    window = group.window(10, torch.float64)
    assert window.local.tolist() == [0.0] * 10
    assert not group.shares_memory
    with pytest.raises(UnsupportedError, match="no shared memory"):
        window.peer(0)
    window.local.fill_(group.rank)
    group.all_reduce(window.local, "max")
    assert window.local.tolist() == [group.size - 1.0] * 10


# Of what every group promises, an engine has no tags, and sums in its own order and precision.
_OF_ENGINES = (
    "check_fifty_works_outstanding_waited_for_in_any_order",
    "check_asynchronous_collectives_of_every_kind_at_once",
    "check_every_moving_collective_for_every_dtype",
    "check_messages_of_every_dtype",
)
CHECKS = checks_of(sys.modules[__name__], collective_checks)
CHECKS += [name for name in checks_of(dtype_checks, order_checks) if name.endswith(_OF_ENGINES)]


@cache
def outcome(ranks: int, native: bool, compared: bool) -> Outcome:
    """One start for each kind of group, however many tests ask."""
    return outcome_of("gloo", ranks, CHECKS, native=native, check=compared)
