"""Gradients that accumulate, are kept under ``no_sync``, and are reduced together, once."""

from __future__ import annotations

from typing import Any

import pytest

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
            assert all(p.grad is None for p in model.parameters())
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


def divides(world: World, reduction: Any, scale: float) -> None:
    model = shard(world, reduction=reduction)
    loss_of(model, *batch(0, world.rank)).backward()
    expected = plain_grads(*(batch(0, r) for r in range(world.size)), scale=scale)
    same_grads(whole_grads(model, world), expected)


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1.0), ("sum", 3.0), (4.0, 0.75)])
def test_the_reduction_is_what_was_asked_for(reduction, scale) -> None:
    ec.run(divides, 3, args=(reduction, scale))
