"""What ``torch.distributed`` promises of a process group, on the backend ``echelon``."""

from collections.abc import Callable
from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.profiler import profile

from tests.c10d.ranks import Ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8)
FOLDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def data(rank: int, dtype: torch.dtype = torch.float64, numel: int = 12) -> Tensor:
    """Small whole numbers, so that sums and products are exact in every dtype."""
    return ((torch.arange(numel) * (rank + 2)) % 3 + 1).to(dtype)


# --- reductions --------------------------------------------------------------------------------


def reduce_in_every_way(rank: int, size: int, name: str, dtype: torch.dtype) -> None:
    op = getattr(ReduceOp, name)
    wanted = reduce(FOLDS[name], [data(r, dtype) for r in range(size)])
    tensor = data(rank, dtype)
    dist.all_reduce(tensor, op)
    assert torch.equal(tensor, wanted)
    tensor = data(rank, dtype)
    dist.reduce(tensor, 1, op)
    assert torch.equal(tensor, wanted if rank == 1 else data(rank, dtype))
    part = torch.empty(12 // size, dtype=dtype)
    dist.reduce_scatter_tensor(part, data(rank, dtype), op)
    assert torch.equal(part, wanted.chunk(size)[rank])
    part.zero_()
    dist.reduce_scatter(part, list(data(rank, dtype).chunk(size)), op)
    assert torch.equal(part, wanted.chunk(size)[rank])
    uneven = torch.empty(rank, dtype=dtype)
    dist.reduce_scatter(uneven, list(data(rank, dtype, 6).split([0, 1, 2, 3])), op)
    whole = reduce(FOLDS[name], [data(r, dtype, 6) for r in range(size)])
    assert torch.equal(uneven, whole.split([0, 1, 2, 3])[rank])


@pytest.mark.parametrize("name", FOLDS)
def test_every_reduction_equals_its_fold_over_the_ranks(ranks: Ranks, name: str) -> None:
    for dtype in DTYPES:
        if not (name.startswith("B") and dtype.is_floating_point):
            ranks.call(reduce_in_every_way, name, dtype)


def average_and_scale(rank: int, size: int) -> None:
    parts = torch.stack([data(r) for r in range(size)])
    tensor = data(rank)
    dist.all_reduce(tensor, ReduceOp.AVG)
    assert torch.equal(tensor, parts.sum(0) / size)
    counts = torch.tensor([7, -rank])
    dist.all_reduce(counts, ReduceOp.AVG)  # rounded toward zero, as by NCCL
    assert counts.tolist() == [7, -int(sum(range(size)) / size)]
    premultiplied = _make_nccl_premul_sum(0.5)
    tensor = data(rank)
    dist.all_reduce(tensor, premultiplied)
    assert torch.equal(tensor, parts.sum(0) / 2)
    source, part = data(rank), torch.empty(3, dtype=torch.float64)
    dist.reduce_scatter_tensor(part, source, premultiplied)
    assert torch.equal(part, (parts.sum(0) / 2).chunk(size)[rank])
    assert torch.equal(source, data(rank))


def test_averages_and_premultiplied_sums_are_scaled_sums(ranks: Ranks) -> None:
    ranks.call(average_and_scale)


def reduce_random(rank: int, size: int) -> bytes:
    torch.manual_seed(rank)
    tensor = torch.randn(10_000, dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    return tensor.view(torch.uint8).numpy().tobytes()


def test_sums_have_the_same_bits_on_all_ranks(ranks: Ranks) -> None:
    assert len(set(ranks.call(reduce_random))) == 1


def reduce_coalesced(rank: int, size: int) -> None:
    total = sum(range(1, size + 1))
    tensors = [
        torch.full((3, n), rank + 1, dtype=d)
        for n, d in ((2, torch.float32), (0, torch.int64), (4, torch.int64))
    ]
    with _coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert all(torch.equal(tensor, torch.full_like(tensor, total)) for tensor in tensors)
    wholes = [torch.arange(size * n) * (rank + 1) for n in (1, 3)]
    parts = [torch.empty(n, dtype=torch.int64) for n in (1, 3)]
    with _coalescing_manager():
        for part, whole in zip(parts, wholes, strict=True):
            dist.reduce_scatter_tensor(part, whole)
    for n, part in zip((1, 3), parts, strict=True):
        assert torch.equal(part, torch.arange(size * n).chunk(size)[rank] * total)
    gathered = [torch.empty(size * n, dtype=torch.int64) for n in (1, 3)]
    with _coalescing_manager():
        for whole, part in zip(gathered, parts, strict=True):
            dist.all_gather_into_tensor(whole, part)
    for n, whole in zip((1, 3), gathered, strict=True):
        assert torch.equal(whole, torch.arange(size * n) * total)


def test_coalesced_collectives_do_what_the_single_ones_do(ranks: Ranks) -> None:
    ranks.call(reduce_coalesced)


# --- copies ------------------------------------------------------------------------------------


def copy_in_every_way(rank: int, size: int, dtype: torch.dtype) -> None:
    tensor = data(rank, dtype).view(4, 3).t()  # not contiguous
    dist.broadcast(tensor, 2)
    assert torch.equal(tensor, data(2, dtype).view(4, 3).t())
    outputs = [torch.empty(r, 2, dtype=dtype) for r in range(size)]
    dist.all_gather(outputs, data(rank, dtype, 2 * rank).view(rank, 2))
    assert all(torch.equal(o, data(r, dtype, 2 * r).view(r, 2)) for r, o in enumerate(outputs))
    whole = torch.empty(size * 12, dtype=dtype)
    dist.all_gather_into_tensor(whole, data(rank, dtype))
    assert torch.equal(whole, torch.cat([data(r, dtype) for r in range(size)]))
    parts = [torch.empty(12, dtype=dtype) for _ in range(size)] if rank == 3 else None
    dist.gather(data(rank, dtype), parts, 3)
    assert parts is None or all(torch.equal(p, data(r, dtype)) for r, p in enumerate(parts))
    part = torch.empty(12, dtype=dtype)
    dist.scatter(part, [data(r, dtype) for r in range(size)] if rank == 1 else None, 1)
    assert torch.equal(part, data(rank, dtype))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.complex64], ids=str)
def test_copies_arrive_where_they_belong(ranks: Ranks, dtype: torch.dtype) -> None:
    ranks.call(copy_in_every_way, dtype)


def exchange_all_to_all(rank: int, size: int) -> None:
    # Rank s sends r rows, or r + s elements, of its number to rank r.
    outputs = [torch.empty(rank + src) for src in range(size)]
    dist.all_to_all(outputs, [torch.full((dst + rank,), float(rank)) for dst in range(size)])
    assert all(
        torch.equal(o, torch.full((rank + src,), float(src))) for src, o in enumerate(outputs)
    )
    output = torch.empty(rank * size, 2)
    source = torch.full((sum(range(size)), 2), float(rank))
    dist.all_to_all_single(output, source, [rank] * size, list(range(size)))
    wanted = torch.arange(size, dtype=torch.float32).repeat_interleave(rank)
    assert torch.equal(output, wanted.view(-1, 1).expand(-1, 2))
    output = torch.empty(size)
    dist.all_to_all_single(output, torch.arange(size) + 10.0 * rank)
    assert torch.equal(output, 10.0 * torch.arange(size) + rank)


def test_all_to_all_takes_equal_and_uneven_parts(ranks: Ranks) -> None:
    ranks.call(exchange_all_to_all)


def exchange_objects(rank: int, size: int) -> None:
    mine = {"rank": rank, "tensor": data(rank), "text": "x" * rank}
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, mine)
    assert [item["text"] for item in gathered] == ["x" * r for r in range(size)]
    received = [mine, rank]
    dist.broadcast_object_list(received, 3)
    assert (received[0]["rank"], received[1]) == (3, 3)
    at_root: list[object] | None = [None] * size if rank == 1 else None
    dist.gather_object(mine, at_root, 1)
    assert at_root is None or torch.equal(at_root[2]["tensor"], data(2))
    scattered: list[object] = [None]
    dist.scatter_object_list(scattered, [f"for {r}" for r in range(size)] if rank == 0 else None, 0)
    assert scattered == [f"for {rank}"]
    if rank == 0:
        dist.send_object_list([mine], 1)
    elif rank == 1:
        item: list[object] = [None]
        dist.recv_object_list(item, 0)
        assert item[0]["rank"] == 0


def test_objects_travel(ranks: Ranks) -> None:
    ranks.call(exchange_objects)


# --- point to point ----------------------------------------------------------------------------


def cross_messages(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    big = 300_000  # longer than what fits on the way
    sends = [
        dist.isend(torch.full((big,), float(rank * 10 + tag)), right, tag=tag) for tag in (1, 2)
    ]
    received = {tag: torch.empty(big) for tag in (2, 1)}
    receives = [dist.irecv(tensor, left, tag=tag) for tag, tensor in received.items()]
    for work in [*receives, *sends]:
        work.wait()
    assert receives[0]._source_rank() == left
    assert all((tensor == left * 10 + tag).all() for tag, tensor in received.items())
    output = torch.empty(2)
    pairs = [
        dist.P2POp(dist.irecv, output, left),
        dist.P2POp(dist.isend, torch.tensor([rank, 7.0]), right),
    ]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    assert output.tolist() == [left, 7.0]


def test_messages_are_matched_by_tag_and_cross_without_deadlock(ranks: Ranks) -> None:
    ranks.call(cross_messages)


# --- groups ------------------------------------------------------------------------------------


def use_subgroups(rank: int, size: int) -> None:
    pairs = [dist.new_group([r, r + 2]) for r in range(2)]
    mine, other = pairs[rank % 2], pairs[1 - rank % 2]
    assert other == dist.GroupMember.NON_GROUP_MEMBER
    assert dist.get_backend(mine) == "echelon"
    assert dist.get_process_group_ranks(mine) == [rank % 2, rank % 2 + 2]
    tensor = torch.tensor([float(rank)])
    outside = dist.all_reduce(torch.tensor([1.0]), async_op=True)  # outstanding on the whole world
    dist.all_reduce(tensor, group=mine)
    assert tensor.item() == 2 * (rank % 2) + 2
    dist.broadcast(tensor, rank % 2 + 2, group=mine)  # ranks of the world
    outside.wait()
    dist.destroy_process_group(mine)
    alone = [dist.new_group([r], backend="cpu:echelon") for r in range(size)][rank]
    dist.all_reduce(tensor, group=alone)
    assert tensor.item() == 2 * (rank % 2) + 2
    dist.destroy_process_group(alone)


def test_subgroups_communicate_apart_from_the_world(ranks: Ranks) -> None:
    ranks.call(use_subgroups)


def describe(rank: int, size: int) -> tuple[object, ...]:
    world = dist.group.WORLD
    before = world._get_sequence_number_for_group()
    dist.barrier()
    return (
        dist.get_backend(),
        world.name(),
        world.rank() - rank,
        world.size(),
        world._device_types,
        world._get_sequence_number_for_group() - before,
        dist.get_backend(dist.new_group(backend="gloo")),
    )


def test_a_process_group_describes_itself_and_lives_beside_gloo(ranks: Ranks) -> None:
    known = ("echelon", "echelon", 0, 4, [torch.device("cpu")], 1, "gloo")
    assert ranks.call(describe) == [known] * 4


def profile_collectives(rank: int, size: int) -> None:
    with profile(record_shapes=True) as profiler:
        dist.all_reduce(data(rank))
        dist.barrier()
    shapes = {event.name: event.input_shapes for event in profiler.events()}
    assert shapes["echelon:all_reduce"] == [[12]]
    assert "echelon:barrier" in shapes


def profile_joined_calls(rank: int, size: int) -> None:
    tensors = [torch.ones(2, 3), torch.ones(4)]
    parts = [[torch.empty(2, 3), torch.empty(1)] for _ in range(size)]
    with profile(record_shapes=True) as profiler:
        dist.all_reduce_coalesced(tensors)
        dist.all_gather_coalesced(parts, [torch.ones(2, 3), torch.ones(1)])
        dist.reduce_scatter(tensors[0], [torch.ones(2, 3)] * size)
        works = [dist.isend(torch.ones(1, 2), rank ^ 1)]
        works.append(dist.irecv(torch.ones(1, 2), None))
        for work in works:
            work.wait()
    calls = [
        (event.name.removeprefix("echelon:"), event.input_shapes)
        for event in profiler.events()
        if event.name.startswith("echelon:") and event.name != "echelon:wait"
    ]
    assert calls == [
        ("all_reduce", [[2, 3], [4]]),
        ("all_gather", [[2, 3], [1]]),
        ("reduce_scatter", [[2, 3]] * size),
        ("send", [[1, 2]]),
        ("recv", [[1, 2]]),
    ]


def test_the_profiler_shows_a_call_of_c10d_once_with_the_shapes_of_its_tensors(
    ranks: Ranks,
) -> None:
    ranks.call(profile_joined_calls)


def test_the_profiler_shows_collectives_of_c10d_by_name_and_shape(ranks: Ranks) -> None:
    ranks.call(profile_collectives)
