"""Collectives of every size: in a slot, in pieces, in windows, and mixed. Groups that share memory.

The numbers of elements are chosen around the borders of the shared-memory backend: a slot holds
64 KiB, a piece of staging 4 MiB.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from echelon.comm.group import Group
from echelon.comm.work import Window
from tests.comm.checking import same

SLOT, PIECE = 1 << 14, 1 << 20  # in float32
NUMELS = (1, SLOT - 1, SLOT, SLOT + 1, PIECE + 3)
_LONGEST = 4 * PIECE


@cache
def _noise() -> Tensor:
    return torch.randn(_LONGEST, generator=torch.Generator().manual_seed(0))


def values(rank: int, numel: int, seed: int = 0) -> Tensor:
    """Random floats, the same for one rank and seed everywhere, and different for each rank."""
    return _noise()[97 * seed : 97 * seed + numel] * (rank + 1.25)


def total(group: Group, numel: int, seed: int = 0) -> Tensor:
    """The sum over ranks, in rank order."""
    result = values(0, numel, seed)
    for rank in range(1, group.size):
        result = result + values(rank, numel, seed)
    return result


def check_all_reduce_of_every_size(group: Group) -> None:
    for numel in (*NUMELS, 2 * PIECE + 12_345):
        mine = values(group.rank, numel)
        group.all_reduce(mine)
        same(mine, total(group, numel), str(numel))


def check_reduce_scatter_of_every_size(group: Group) -> None:
    for numel in (1, SLOT // group.size, SLOT // group.size + 1, PIECE + 3):
        output = torch.empty(numel)
        group.reduce_scatter_single(output, values(group.rank, numel * group.size), "mean")
        start = numel * group.rank
        expected = total(group, numel * group.size)[start : start + numel] / group.size
        same(output, expected, str(numel))


def check_reduce_scatter_of_every_size_in_different_lengths(group: Group) -> None:
    for numel in (1, SLOT + 1, PIECE + 3):
        splits = [numel + 5 * r if r else 0 for r in range(group.size)]
        length, start = sum(splits), sum(splits[: group.rank])
        expected = total(group, length)[start : start + splits[group.rank]]
        output = torch.empty(splits[group.rank])
        group.reduce_scatter_single(output, values(group.rank, length), splits=splits)
        same(output, expected, str(numel))
        window = group.window(length)
        window.local.copy_(values(group.rank, length))
        group.reduce_scatter_single(output.zero_(), window.local, splits=splits)
        same(output, expected, f"{numel} in a window")
        window.close()


def check_one_tensor_that_is_the_same_memory_on_all_ranks(group: Group) -> None:
    n, rank = group.size, group.rank
    for dtype in (torch.float32, torch.bfloat16):
        shared = group.shared_tensor(3 * n, dtype)
        same(shared, torch.zeros(3 * n, dtype=dtype))
        group.barrier()
        shared[3 * rank : 3 * rank + 3] = rank + 1
        group.barrier()
        same(shared, torch.arange(1, n + 1).repeat_interleave(3).to(dtype))
        group.barrier()
    assert group.shared_tensor(0).numel() == 0


def check_all_gather_of_every_size(group: Group) -> None:
    for numel in NUMELS:
        output = torch.empty(numel * group.size)
        group.all_gather_single(output, values(group.rank, numel))
        same(output, torch.cat([values(r, numel) for r in range(group.size)]), str(numel))
        mine = output.chunk(group.size)[group.rank]
        mine.mul_(2)
        group.all_gather_single(output, mine)  # the input lies in the output
        same(output, torch.cat([2 * values(r, numel) for r in range(group.size)]), str(numel))
        outputs = [torch.empty(numel + r) for r in range(group.size)]
        group.all_gather(outputs, values(group.rank, numel + group.rank))
        for rank, found in enumerate(outputs):
            same(found, values(rank, numel + rank), str(numel))


def check_rooted_collectives_of_every_size(group: Group) -> None:
    n, rank = group.size, group.rank
    for root, numel in enumerate(NUMELS):
        root %= n
        value = values(rank, numel)
        group.broadcast(value, root)
        same(value, values(root, numel), f"broadcast {numel}")
        value = values(rank, numel)
        group.reduce(value, root)
        expected = total(group, numel) if rank == root else values(rank, numel)
        same(value, expected, f"reduce {numel}")
        outputs = [torch.empty(numel) for _ in range(n)]
        group.gather(values(rank, numel), outputs if rank == root else None, root)
        if rank == root:
            for r, found in enumerate(outputs):
                same(found, values(r, numel), f"gather {numel}")
        inputs = [values(r, numel, seed=root) for r in range(n)]
        part = torch.empty(numel)
        group.scatter(part, inputs if rank == root else None, root)
        same(part, inputs[rank], f"scatter {numel}")


def check_all_to_all_of_every_size(group: Group) -> None:
    n, rank = group.size, group.rank
    for numel in (1, SLOT + 1, PIECE + 3):
        # r sends numel + r + s elements to s
        ins, outs = [numel + rank + s for s in range(n)], [numel + s + rank for s in range(n)]
        parts = [values(rank, length, seed=s) for s, length in enumerate(ins)]
        output = torch.empty(sum(outs))
        group.all_to_all_single(output, torch.cat(parts), outs, ins)
        same(output, torch.cat([values(s, outs[s], seed=rank) for s in range(n)]), str(numel))


def check_collectives_inside_a_window(group: Group) -> None:
    n, numel = group.size, 3 * SLOT + 5
    window = group.window(n * numel)
    local = window.local
    for start, length in ((0, n * numel), (7, 2 * SLOT + 9), (SLOT, 100), (3, 2 * SLOT)):
        local[start : start + length].copy_(values(group.rank, length, seed=start))
        group.all_reduce(local[start : start + length])
        same(local[start : start + length], total(group, length, seed=start), f"{start} {length}")
    local.copy_(values(group.rank, n * numel))
    output = torch.empty(numel)
    group.reduce_scatter_single(output, local)
    own = slice(numel * group.rank, numel * (group.rank + 1))
    same(output, total(group, n * numel)[own])
    group.barrier()
    local[own] = output  # the shard where it belongs, then gathered in place
    group.all_gather_single(local, local[own])
    same(local, total(group, n * numel))
    gathered = torch.empty(n * numel)
    local.copy_(values(group.rank, n * numel))
    group.all_gather_single(gathered, local[:numel])  # one place of all windows
    same(gathered, torch.cat([values(r, n * numel)[:numel] for r in range(n)]))
    window.close()


def check_a_reduce_scatter_inside_a_window_may_land_anywhere(group: Group) -> None:
    n, numel = group.size, 2 * SLOT
    window = group.window(n * numel)
    for attempt in range(3 * n):
        place = attempt % n
        window.local.copy_(values(group.rank, n * numel, seed=attempt))
        output = window.local[place * numel : (place + 1) * numel]
        group.reduce_scatter_single(output, window.local)
        own = slice(numel * group.rank, numel * (group.rank + 1))
        same(output, total(group, n * numel, seed=attempt)[own], f"place {place}")
    window.close()


def check_a_window_on_one_rank_and_an_ordinary_tensor_on_another(group: Group) -> None:
    n, numel = group.size, 2 * SLOT + 1
    window: Window = group.window(n * numel)
    other: Window = group.window(n * numel)
    sources = (window.local, other.local, torch.empty(n * numel))
    for shift in range(2):
        mine = sources[(group.rank + shift) % 3]
        mine.copy_(values(group.rank, n * numel, seed=shift))
        group.all_reduce(mine)
        same(mine, total(group, n * numel, seed=shift), f"all_reduce {shift}")
        mine.copy_(values(group.rank, n * numel, seed=shift))
        output = torch.empty(numel)
        group.reduce_scatter_single(output, mine)
        own = slice(numel * group.rank, numel * (group.rank + 1))
        same(output, total(group, n * numel, seed=shift)[own], f"reduce_scatter {shift}")
        mine.copy_(values(group.rank, n * numel, seed=shift))
        # The same window, at different places.
        part = mine[group.rank * 5 : group.rank * 5 + numel]
        gathered = torch.empty(n * numel)
        group.all_gather_single(gathered, part)
        parts = [values(r, n * numel, seed=shift)[r * 5 : r * 5 + numel] for r in range(n)]
        same(gathered, torch.cat(parts), f"all_gather {shift}")
        group.barrier()


def check_a_window_seen_as_another_dtype(group: Group) -> None:
    window = group.window(8 * SLOT, torch.uint8)
    numbers = window.local.view(torch.bfloat16)[SLOT // 2 :]
    numbers.fill_(group.rank + 1.0)
    group.all_reduce(numbers, "mean")
    same(numbers, torch.full_like(numbers, (group.size + 1) / 2))
    window.close()


def check_a_thousand_collectives_back_to_back(group: Group) -> None:
    n, rank = group.size, group.rank
    for k in range(1000):
        value = torch.tensor([float(rank * k), float(k)])
        if k % 3 == 0:
            group.all_reduce(value)
            same(value, torch.tensor([float(k * sum(range(n))), float(k * n)]), str(k))
        elif k % 3 == 1:
            group.broadcast(value, k % n)
            same(value, torch.tensor([float((k % n) * k), float(k)]), str(k))
        else:
            output = torch.empty(2 * n)
            group.all_gather_single(output, value)
            expected = torch.tensor([[float(r * k), float(k)] for r in range(n)])
            same(output, expected.view(-1), str(k))
