"""Gradients that accumulate, are kept under ``no_sync``, and are reduced together, once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import StateError
from tests.fsdp.checking import plain_grads, same_grads, shard, whole_grads
from tests.fsdp.models import batch, loss_of


def accumulates(world: World, way: str) -> None:
    model = shard(world)
    steps = 3
    mine = [batch(step, world.rank) for step in range(steps)]
    for i, one in enumerate(mine):
        loss = loss_of(model, *one) / steps
        if way == "shards" or i == steps - 1:
            loss.backward()
        else:
            with model.no_sync():
                loss.backward()
            weight = next(model.parameters())
            with pytest.raises(StateError, match="are not reduced yet"):
                weight.grad.sum()
    same_grads(
        whole_grads(model, world),
        plain_grads(*(batch(s, r) for s in range(steps) for r in range(world.size))),
    )


@pytest.mark.parametrize("way", ["shards", "no_sync"])
def test_gradients_accumulate_whole_or_in_shards(way) -> None:
    ec.run(accumulates, 2, args=(way,))


def syncs_by_hand(world: World) -> None:
    model = shard(world)
    with model.no_sync():
        loss_of(model, *batch(0, world.rank)).backward()
        with pytest.raises(StateError, match="inside no_sync"):
            model.sync_gradients()
    model.sync_gradients()
    same_grads(whole_grads(model, world), plain_grads(*(batch(0, r) for r in range(world.size))))
    with pytest.raises(StateError, match="no gradients to reduce"):
        model.sync_gradients()


@pytest.mark.slow
def test_gradients_are_reduced_by_hand() -> None:
    ec.run(syncs_by_hand, 3)


class UsedByFirst(nn.Module):
    """Has a layer that only rank 0 uses."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer, self.rank = nn.Linear(4, 4), rank

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.rank else self.layer(x)


def syncs_without_gradients(world: World) -> float:
    torch.manual_seed(0)
    rule = ec.units.by_type(nn.Linear)
    model = ec.FSDP(UsedByFirst(world.rank), world.group, units=rule, min_num_params=0)
    with model.no_sync():
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    model.sync_gradients()
    with pytest.raises(StateError, match="no gradients to reduce"):
        model.sync_gradients()
    return model.module.layer.bias.grad.sum().item()


def test_a_rank_whose_forward_used_no_parameter_takes_part_in_a_reduction_by_hand() -> None:
    assert ec.run(syncs_without_gradients, 2) == [4.0, 4.0]  # the mean of 2 and 0, four times


def divides(world: World, reduction: Any, scale: float) -> None:
    model = shard(world, reduction=reduction)
    loss_of(model, *batch(0, world.rank)).backward()
    expected = plain_grads(*(batch(0, r) for r in range(world.size)), scale=scale)
    same_grads(whole_grads(model, world), expected)


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1.0), ("sum", 3.0), (4.0, 0.75)])
def test_the_reduction_is_what_was_asked_for(reduction, scale) -> None:
    ec.run(divides, 3, args=(reduction, scale))
