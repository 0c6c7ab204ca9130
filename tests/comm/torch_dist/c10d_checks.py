"""Checks of groups over gloo (our algorithms) and over an engine's collectives, as NCCL is used.

What every group promises is in ``tests/comm/test_group.py``. Here is what depends on c10d: lengths
in one round and in pieces, an engine's dtypes, progress beside the caller, tags, subgroups.
All checks of one kind of group run in one start of its ranks; each is then a test.
"""

import time
import traceback
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from echelon.comm.reduce_op import check_op
from echelon.comm.torch_dist.group import PeerGroup
from echelon.comm.world import World
from echelon.errors import ArgumentError, CommTimeout, UnsupportedError
from tests.comm.gloo_ranks import run_gloo

CHECKS: dict[str, Callable[[World], None]] = {}

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
EVERY = (*INTEGERS, *UNSIGNED, *FLOATS, *COMPLEX, *FLOAT8, torch.bool)
LENGTHS = (1, 7, 1000, 300_001, 2_500_003)


def check(run: Callable[[World], None]) -> Callable[[World], None]:
    """Let a function be one check of every kind of group."""
    CHECKS[run.__name__] = run
    return run


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What ``rank`` brings: known to all ranks, different on each."""
    pattern = torch.arange(numel).mul_(2 * rank + 3 * seed + 1).remainder_(61)
    if dtype.is_complex:
        return torch.complex(pattern / 7 - 4, pattern / 11).to(dtype)
    if dtype.is_floating_point:
        return (pattern / 7 - 4).to(dtype)  # sums of these depend on their order
    return pattern.remainder(2).to(dtype) if dtype == torch.bool else pattern.to(dtype)


def everyone(
    world: World, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    """What all ranks bring, in rank order."""
    return [values(rank, numel, dtype, seed) for rank in range(world.size)]


def total(parts: list[Tensor], op: str) -> Tensor:
    """The reduction in rank order, narrow floats in float32 and rounded once."""
    dtype = parts[0].dtype
    narrow = dtype in (torch.float16, torch.bfloat16, *FLOAT8)
    wide = torch.float32 if narrow else torch.int64 if dtype in UNSIGNED else dtype
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


def assert_reduced(world: World, result: Tensor, expected: Tensor) -> None:
    """Bitwise with our algorithms; an engine sums in its own order and precision."""
    ours = isinstance(world.group, PeerGroup) or result.dtype in FLOAT8
    if ours or not result.dtype.is_floating_point:
        if result.is_complex() and not isinstance(world.group, PeerGroup):
            torch.testing.assert_close(result, expected)
        else:
            assert torch.equal(as_bytes(result), as_bytes(expected))
    else:
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2, check_dtype=True)


def as_bytes(tensor: Tensor) -> Tensor:
    """For comparing bits of dtypes that have no comparison."""
    return tensor.contiguous().view(-1).view(torch.uint8)


# --- the checks --------------------------------------------------------------------------------


@check
def the_numbers_of_four_ranks(world: World) -> None:
    group = world.group.subgroup(range(min(4, world.size)))
    if world.size < 4 or group is None:
        return
    r = float(group.rank)
    tensor = torch.tensor([r])
    group.all_reduce(tensor)
    assert tensor.tolist() == [6.0]
    tensor = torch.tensor([r])
    group.all_reduce(tensor, "mean")
    assert tensor.tolist() == [1.5]
    tensor = torch.full((2,), 42.0) if r == 0 else torch.zeros(2)
    group.broadcast(tensor, src=0)
    assert tensor.tolist() == [42.0, 42.0]
    gathered = torch.empty(8)
    group.all_gather_single(gathered, torch.tensor([10 * r, 10 * r + 1]))
    assert gathered.tolist() == [0, 1, 10, 11, 20, 21, 30, 31]
    part = torch.empty(1)
    group.reduce_scatter_single(part, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert part.tolist() == [[4.0], [8.0], [12.0], [16.0]][group.rank]


@check
def every_dtype_is_reduced_by_every_operation_that_has_a_meaning(world: World) -> None:
    for dtype in EVERY:
        for op in ("sum", "mean", "product", "min", "max", "band", "bor", "bxor"):
            if (op in ("min", "max") and dtype in FLOAT8) or (dtype in UNSIGNED and "b" in op):
                continue  # torch has no such operation to compare with
            try:
                check_op(op, dtype)
            except ArgumentError:
                continue
            parts = everyone(world, 13, dtype)
            tensor = parts[world.rank].clone()
            world.group.all_reduce(tensor, op)
            assert_reduced(world, tensor, total(parts, op))


@check
def reductions_of_all_lengths_run_in_rank_order(world: World) -> None:
    for numel in LENGTHS:
        for dtype in (torch.float32, torch.bfloat16)[: 1 if numel > 10**6 else 2]:
            parts = everyone(world, numel, dtype, seed=numel)
            tensor = parts[world.rank].clone()
            world.group.all_reduce(tensor, "mean")
            assert_reduced(world, tensor, total(parts, "mean"))


@check
def a_reduce_scatter_leaves_each_rank_its_part(world: World) -> None:
    for numel in (0, 3, 400_001):
        for dtype in (torch.float32, torch.float16, torch.int16, torch.complex64):
            parts = everyone(world, world.size * numel, dtype, seed=1)
            output = torch.empty(numel, dtype=dtype)
            source = parts[world.rank].clone()
            world.group.reduce_scatter_single(output, source)
            expected = total(parts, "sum")[world.rank * numel : (world.rank + 1) * numel]
            assert_reduced(world, output, expected)
            assert torch.equal(source, parts[world.rank])
    lengths = [3, *[1_500_001] * (world.size - 1)]  # all go one way, in pieces
    parts, output = everyone(world, sum(lengths), seed=2), torch.empty(lengths[world.rank])
    world.group.reduce_scatter_single(output, parts[world.rank].clone(), splits=lengths)
    assert_reduced(world, output, total(parts, "sum").split(lengths)[world.rank])


@check
def every_dtype_is_moved(world: World) -> None:
    group, size = world.group, world.size
    for dtype in EVERY:
        parts = everyone(world, 6, dtype)
        gathered = torch.empty(size * 6, dtype=dtype)
        group.all_gather_single(gathered, parts[world.rank])
        assert torch.equal(as_bytes(gathered), as_bytes(torch.cat(parts)))
        tensor = parts[world.rank].clone()
        group.broadcast(tensor, src=size - 1)
        assert torch.equal(as_bytes(tensor), as_bytes(parts[-1]))
        if world.rank == 0:
            group.send(parts[0], dst=1)
        elif world.rank == 1:
            received = torch.empty(6, dtype=dtype)
            group.recv(received, src=0)
            assert torch.equal(as_bytes(received), as_bytes(parts[0]))


@check
def a_long_broadcast_comes_from_any_source(world: World) -> None:
    for src in range(world.size):
        tensor = values(world.rank, 700_003, seed=src)
        world.group.broadcast(tensor, src)
        assert torch.equal(tensor, values(src, 700_003, seed=src))


@check
def an_all_gather_may_be_uneven(world: World) -> None:
    lengths = [3 * rank for rank in range(world.size)]
    outputs = [torch.empty(n) for n in lengths]
    world.group.all_gather(outputs, values(world.rank, lengths[world.rank]))
    for rank, output in enumerate(outputs):
        assert torch.equal(output, values(rank, lengths[rank]))


@check
def an_all_to_all_may_be_uneven_and_leave_ranks_out(world: World) -> None:
    size, me = world.size, world.rank
    rows = [[(a * 3 + b) % 4 for b in range(size)] for a in range(size)]  # from a to b
    parts = [torch.full((rows[me][b], 2), 10.0 * me + b) for b in range(size)]
    output = torch.empty(sum(rows[a][me] for a in range(size)), 2)
    world.group.all_to_all_single(
        output, torch.cat(parts), [rows[a][me] for a in range(size)], rows[me]
    )
    assert torch.equal(
        output, torch.cat([torch.full((rows[a][me], 2), 10.0 * a + me) for a in range(size)])
    )


@check
def a_reduce_changes_the_destination_only(world: World) -> None:
    for numel in (5, 1_200_000):
        parts = everyone(world, numel)
        tensor = parts[world.rank].clone()
        world.group.reduce(tensor, dst=1, op="mean")
        if world.rank == 1:
            assert_reduced(world, tensor, total(parts, "mean"))
        else:
            assert torch.equal(tensor, parts[world.rank])


@check
def a_gather_and_a_scatter_are_each_others_inverse(world: World) -> None:
    group, me = world.group, world.rank
    parts = everyone(world, 9)
    outputs = [torch.empty(9) for _ in parts] if me == 1 else None
    group.gather(parts[me], outputs, dst=1)
    back = torch.empty(9)
    group.scatter(back, outputs, src=1)
    assert torch.equal(back, parts[me])
    if outputs is not None:
        assert all(torch.equal(a, b) for a, b in zip(outputs, parts, strict=True))


@check
def many_collectives_may_be_outstanding_and_waited_for_in_any_order(world: World) -> None:
    group, works = world.group, []
    for i in range(40):
        numel = (i * 7919) % 5000 + 1
        parts = everyone(world, numel, seed=i)
        tensor = parts[world.rank].clone()
        if i % 3 == 0:
            gathered = torch.empty(world.size * numel)
            work = group.all_gather_single(gathered, tensor, async_op=True)
            works.append((work, gathered, torch.cat(parts)))
        elif i % 3 == 1:
            work = group.all_reduce(tensor, "sum", async_op=True, label=f"bucket {i}")
            works.append((work, tensor, total(parts, "sum")))
        else:
            work = group.broadcast(tensor, i % world.size, async_op=True)
            works.append((work, tensor, parts[i % world.size]))
    for work, result, expected in reversed(works):
        assert work is not None
        work.wait()
        torch.testing.assert_close(result, expected)


@check
def a_collective_proceeds_while_its_caller_computes(world: World) -> None:
    tensor = values(world.rank, 200_000)
    work = world.group.all_reduce(tensor, async_op=True)
    assert work is not None
    end = time.monotonic() + 10
    while not work.done() and time.monotonic() < end:
        torch.ones(64, 64) @ torch.ones(64, 64)
    assert work.done()
    work.wait()


@check
def a_wait_may_time_out_and_be_repeated(world: World) -> None:
    if not isinstance(world.group, PeerGroup) and world.group._agreement is not None:
        return  # the calls are compared before an engine gets one, so the issue waits already
    if world.rank == 0:
        time.sleep(0.4)
    tensor = torch.ones(2)
    work = world.group.all_reduce(tensor, async_op=True)
    assert work is not None
    if world.rank == 1:
        with pytest.raises(CommTimeout, match=r"waited 0\.1 s for rank") as info:
            work.wait(timeout=0.1)
        assert 0 in info.value.missing
    work.wait()
    assert tensor.tolist() == [world.size] * 2


@check
def messages_are_told_apart_by_their_tags(world: World) -> None:
    if not isinstance(world.group, PeerGroup):
        return  # NCCL has no tags, so an engine's messages match in the order of issue
    if world.rank == 0:
        works = [world.group.isend(torch.full((3,), float(tag)), 1, tag) for tag in (1, 2, 65535)]
        for work in works:
            work.wait()
    elif world.rank == 1:
        for tag in (65535, 2, 1):
            tensor = torch.empty(3)
            world.group.recv(tensor, 0, tag)
            assert tensor.tolist() == [tag] * 3
    with pytest.raises(ArgumentError, match="tag 65536"):
        world.group.isend(torch.ones(1), 1 - min(world.rank, 1), tag=65536)


@check
def a_message_may_be_asked_for_and_time_out(world: World) -> None:
    if not isinstance(world.group, PeerGroup):
        return
    if world.rank == 1:
        tensor = torch.empty(2)
        work = world.group.irecv(tensor, 0, tag=9)
        assert not work.done()
        with pytest.raises(CommTimeout, match="recv float32"):
            work.wait(timeout=0.05)
        world.group.send(torch.ones(1), 0, tag=8)
        work.wait(timeout=10.0)
        assert work.done()
        assert tensor.tolist() == [5.0, 5.0]
    elif world.rank == 0:
        world.group.recv(torch.empty(1), 1, tag=8)
        world.group.send(torch.full((2,), 5.0), 1, tag=9)


@check
def subgroups_of_subgroups_need_their_own_ranks_only(world: World) -> None:
    group, size = world.group, world.size
    pairs = [group.subgroup([0, other]) for other in range(1, size)]  # rank 0 is in all of them
    for other, pair in enumerate(pairs, start=1):
        if pair is None:
            assert world.rank not in (0, other)
            continue
        assert pair.ranks == (0, other)
        inner = pair.subgroup([1])  # the other ranks of the job do not know of it
        assert (inner is not None) == (world.rank == other)
        tensor = torch.tensor([float(world.rank)])
        pair.all_reduce(tensor)
        assert tensor.item() == other
    group.barrier()


@check
def a_window_is_local_memory(world: World) -> None:
    window = world.group.window(10, torch.float64)
    assert window.local.tolist() == [0.0] * 10
    assert not world.group.shares_memory
    with pytest.raises(UnsupportedError, match="no shared memory"):
        window.peer(0)
    window.local.fill_(world.rank)
    world.group.all_reduce(window.local, "max")
    assert window.local.tolist() == [world.size - 1.0] * 10


# --- the runs ----------------------------------------------------------------------------------


def run_checks(world: World) -> dict[str, str]:
    """The traceback of each check that failed on this rank, by name."""
    failures = {}
    for name, run in CHECKS.items():
        try:
            run(world)
        except BaseException:
            failures[name] = f"rank {world.rank} of {world.size}:\n{traceback.format_exc()}"
            break  # the ranks are no longer in step
    return failures


@cache
def failures_of(ranks: int, native: bool, compared: bool) -> dict[str, str]:
    """The failed checks of one start of a group of this kind, with their tracebacks."""
    failures: dict[str, str] = {}
    for failed in run_gloo(run_checks, ranks, native=native, check=compared):
        failures |= {name: failures.get(name, "") + text for name, text in failed.items()}
    return failures


def assert_passed(name: str, ranks: int, *, native: bool, compared: bool) -> None:
    """Run all checks on one kind of group, once, and fail if this one failed."""
    failures = failures_of(ranks, native, compared)
    assert name not in failures, failures[name]
    order = list(CHECKS)
    first = min((order.index(failed) for failed in failures), default=len(order))
    assert order.index(name) < first, f"was not reached: {order[first]} failed before it"
