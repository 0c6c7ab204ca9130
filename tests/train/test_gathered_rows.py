"""Losses over the outputs of all ranks train as one process trains on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from echelon.comm.world import World
from tests.worlds import KINDS, run_world

ROWS = 7  # which 2 and 3 ranks share unevenly


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(2, ROWS, 5, generator=generator, dtype=torch.float64)
    return x[0], x[1]


def contrast(queries: Tensor, keys: Tensor, first: int = 0) -> Tensor:
    """InfoNCE: the key of a query is the one of its row; all others are negatives."""
    target = torch.arange(first, first + len(queries))
    similar = nn.functional.normalize(queries, dim=1) @ nn.functional.normalize(keys, dim=1).T
    return nn.functional.cross_entropy(similar / 0.1, target)


def one_process(steps: int) -> list[Tensor]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    for step in range(steps):
        a, b = batch(step)
        contrast(model(a), model(b)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def wrap(world: World, technique: str) -> nn.Module:
    model = make_model()
    if technique == "DDP":
        return ec.DDP(model, world.group)
    options: dict[str, Any] = {"min_num_params": 0, "units": ec.units.by_type(nn.Linear)}
    return ec.FSDP(model, world.group, **options, layout=technique)


def train(world: World, technique: str, form: str) -> list[Tensor]:
    model, group = wrap(world, technique), world.group
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
    bounds = [ROWS * rank // world.size for rank in range(world.size + 1)]
    first, stop = bounds[world.rank : world.rank + 2]
    for step in range(3):
        rows = torch.cat([x[first:stop] for x in batch(step)])
        queries, keys = model(rows).chunk(2)
        if form == "the loss of all rows on every rank":
            loss = contrast(ec.all_gather_rows(queries, group), ec.all_gather_rows(keys, group))
        else:  # each rank's rows against all: its mean counts by its rows
            loss = contrast(queries, ec.all_gather_rows(keys, group), first)
            loss = loss * (stop - first) * world.size / ROWS
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in model.state_dict().values()]


FORMS = ("the loss of all rows on every rank", "rows of a rank against all")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_loss_over_all_ranks_trains_the_weights_of_one_process(kind: str, ranks: int) -> None:
    expected = one_process(3)

    for technique in ("DDP", "flat", "rows"):
        for form in FORMS:
            for found in run_world(kind, train, ranks, args=(technique, form)):
                for param, value in zip(found, expected, strict=True):
                    torch.testing.assert_close(param, value, rtol=1e-12, atol=1e-12)


def check_rows(world: World, dtype: torch.dtype, trailing: tuple[int, ...]) -> None:
    """Ranks have as many rows as their number, so rank 0 has none."""
    full = (torch.arange(3 * 8) + 1).to(dtype).reshape(3, 8)[:, : 4 if trailing else 1]
    rows = [full[0:0], full[0:1], full[1:3]][world.rank].reshape(world.rank, *trailing).clone()
    rows.requires_grad_(rows.is_floating_point())
    found = ec.all_gather_rows(rows, world.group)
    assert torch.equal(found, full.reshape(3, *trailing))
    if rows.requires_grad:
        (found.sum() * (world.rank + 1)).backward()
        assert torch.equal(rows.grad, torch.full_like(rows, 1 + 2 + 3))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("trailing", [(), (4,), (2, 2)])
def test_rows_come_in_the_order_of_ranks_also_where_one_has_none(
    dtype: torch.dtype, trailing: tuple[int, ...]
) -> None:
    ec.run(check_rows, 3, args=(dtype, trailing))


def test_the_gather_is_repeated_where_activations_are_recomputed() -> None:
    def main(world: World) -> None:
        x = torch.full((2, 3), world.rank + 1.0, requires_grad=True)

        def loss(x: Tensor) -> Tensor:
            return (ec.all_gather_rows(x, world.group) ** 2).sum()

        checkpoint(loss, x, use_reentrant=False).backward()
        assert torch.equal(x.grad, 2 * x.detach() * world.size)

    ec.run(main, 2)


def test_rows_of_different_shapes_are_refused_on_all_ranks() -> None:
    def main(world: World) -> None:
        with pytest.raises(ec.CollectiveMismatch, match=r"rows of shape \[3\]"):
            ec.all_gather_rows(torch.zeros(2, 3 + world.rank), world.group)

    ec.run(main, 2)


@pytest.mark.parametrize("value", [3.0, None, torch.tensor(1.0)])
def test_what_has_no_rows_is_refused(value: object) -> None:
    def main(world: World) -> None:
        with pytest.raises(ec.ArgumentError, match="tensor is"):
            ec.all_gather_rows(value, world.group)  # type: ignore[arg-type]

    ec.run(main, 1)
