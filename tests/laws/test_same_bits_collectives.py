"""Law: sums have the same bits on every rank, in every run, in every world, by every path."""

import hashlib
from functools import cache

import pytest
import torch
from torch import Tensor

import echelon as ec
from tests.comm.gloo_ranks import run_gloo
from tests.worlds import run_world

RANKS = 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64)
# In one slot, in one piece and in two pieces of shared memory; lengths that no rank divides.
NUMELS = (5, 20_011, 1_100_003)


def noise(rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Numbers of very different size, so that another order of summation shows at once."""
    generator = torch.Generator().manual_seed(rank)
    wide = torch.complex64 if dtype.is_complex else torch.float32
    values = torch.randn(numel, generator=generator, dtype=wide)
    scale = torch.randint(-6, 6, (numel,), generator=generator)
    return (values * torch.exp2(scale.float())).to(dtype)


class Digest:
    """A hash of every tensor that it was given, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._hash.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    def __str__(self) -> str:
        return self._hash.hexdigest()


def battery(world: ec.World) -> tuple[str, str]:
    """Digests of what must be equal on all ranks, and of what is this rank's own."""
    group, replicated, own = world.group, Digest(), Digest()
    for dtype in DTYPES:
        for numel in NUMELS:
            if numel == NUMELS[-1] and dtype not in (torch.float32, torch.bfloat16):
                continue
            mine = noise(group.rank, numel, dtype)
            for op in ("sum", "mean", "product"):
                total = mine.clone()
                work = group.all_reduce(total, op, async_op=op == "mean")
                if work is not None:
                    work.wait()
                replicated.add(total)
            whole = mine[: numel // RANKS * RANKS]
            part = torch.empty(numel // RANKS, dtype=dtype)
            group.reduce_scatter_single(part, whole, "mean")
            own.add(part)
            gathered = torch.empty_like(whole)
            group.all_gather_single(gathered, part)
            replicated.add(gathered)
            group.reduce(mine, 1)
            own.add(mine)
    return str(replicated), str(own)


@cache
def digests(kind: str, run: int) -> list[tuple[str, str]]:
    if kind == "gloo":
        return run_gloo(battery, RANKS, timeout=60.0)
    return run_world(kind, battery, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_all_ranks_hold_the_same_bits(kind) -> None:
    assert len({replicated for replicated, _ in digests(kind, 0)}) == 1


def test_ranks_hold_parts_of_their_own() -> None:
    assert len({own for _, own in digests("threads", 0)}) == RANKS


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_two_runs_give_the_same_bits(kind) -> None:
    assert digests(kind, 0) == digests(kind, 1)


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_all_worlds_give_the_same_bits(kind) -> None:
    assert digests(kind, 0) == digests("threads", 0)


def by_every_path(world: ec.World) -> bool:
    """Whether all ways to a sum give what a plain all-reduce gives."""
    group, numel = world.group, 30_000 * RANKS
    mine = noise(group.rank, numel, torch.float32)
    expected = mine.clone()
    group.all_reduce(expected)
    background = mine.clone()
    work = group.all_reduce(background, async_op=True)
    window = group.window(numel)
    window.local.copy_(mine)
    group.all_reduce(window.local)
    shard = torch.empty(30_000)
    group.reduce_scatter_single(shard, mine)
    gathered = torch.empty(numel)
    group.all_gather_single(gathered, shard)
    assert work is not None
    work.wait()
    strided = torch.stack([mine, mine], 1)[:, 0]
    group.all_reduce(strided)
    pieces = [mine[start : start + 7000].clone() for start in range(0, numel, 7000)]
    for piece in pieces:
        group.all_reduce(piece)
    results = (background, window.local, gathered, strided.contiguous(), torch.cat(pieces))
    return all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_every_path_gives_the_same_bits(kind) -> None:
    assert run_world(kind, by_every_path, RANKS) == [True] * RANKS


def test_the_law_would_see_another_order_of_summation() -> None:
    parts = [noise(rank, 1000, torch.float32) for rank in range(RANKS)]
    assert not torch.equal(parts[0] + parts[1] + parts[2], parts[2] + parts[1] + parts[0])
