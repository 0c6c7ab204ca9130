"""Copies of a sharded model, and averages of its weights."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import StateError
from tests.fsdp.checking import plain_grads, same_grads, shard, whole_grads
from tests.fsdp.models import batch, build, loss_of
from tests.reference import assert_states_close, assert_states_equal
from tests.worlds import run_world

LOW = ec.MixedPrecision(reduce=torch.float32)


def parts(model: ec.FSDP) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@cache
def grads_of_one_batch(size: int) -> dict[str, Tensor]:
    return plain_grads(*(batch(0, rank) for rank in range(size)))


def copies(world: World, options: dict[str, Any]) -> None:
    model = shard(world, **options)
    model.eval().train()
    loss_of(model, *batch(0, world.rank)).backward()
    before, gathers = parts(model), model.memory_stats().num_all_gathers
    clone = copy.deepcopy(model)
    assert type(clone) is ec.FSDP
    assert clone.group is model.group
    assert clone.units == model.units
    assert all(p.grad is None for p in clone.parameters())
    assert not {id(p) for p in clone.parameters()} & {id(p) for p in model.parameters()}
    # The copy trains as the model would, and neither sees the other.
    loss_of(clone, *batch(0, world.rank)).backward()
    same_grads(whole_grads(clone, world), grads_of_one_batch(world.size))
    same_grads(whole_grads(model, world), grads_of_one_batch(world.size))
    assert model.memory_stats().num_all_gathers == gathers
    with torch.no_grad():
        for param in clone.parameters():
            param.zero_()
    clone.shift.zero_()
    assert_states_equal(parts(model), before)
    assert model.shift.sum() > 0
    assert all(not value.any() for value in clone.state_dict().values())
    with model.full_parameters(), pytest.raises(StateError, match="copy the model outside"):
        copy.deepcopy(model)


OPTIONS = [
    {"layout": "flat"},
    {"layout": "rows", "strategy": ec.Strategy.SHARD_GRAD_OP},
    {"min_num_params": 120, "strategy": ec.Strategy.SHARD_OPTIMIZER},
]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=["flat", "rows", "small units whole"])
def test_a_copy_shares_nothing_and_trains_on_its_own(options) -> None:
    ec.run(copies, 3, args=(options,))


def outlives(world: World) -> None:
    model = shard(world)
    loss_of(model, *batch(0, world.rank)).backward()
    clone = copy.deepcopy(model)
    find = weakref.ref(model._hooks)
    del model
    for rank in range(world.size):  # the collector of a process runs once at a time
        world.group.barrier()
        if rank == world.rank:
            gc.collect()
    world.group.barrier()
    assert find() is None
    second = copy.deepcopy(clone)
    del clone
    loss_of(second, *batch(0, world.rank)).backward()
    same_grads(whole_grads(second, world), grads_of_one_batch(world.size))


def test_a_copy_outlives_its_model() -> None:
    ec.run(outlives, 2)


def freezes(world: World) -> None:
    model = shard(world)
    model.requires_grad_(False)
    clone = copy.deepcopy(model)
    assert not any(p.requires_grad for p in clone.parameters())
    names = {name for name, p in build().named_parameters() if p.requires_grad}
    for name, param in clone.named_parameters():
        param.requires_grad_(name in names)
    loss_of(clone, *batch(0, world.rank)).backward()
    same_grads(whole_grads(clone, world), grads_of_one_batch(world.size))


def test_a_frozen_copy_can_be_trained_again() -> None:
    ec.run(freezes, 2)


def averages(world: World, options: dict[str, Any]) -> None:
    """Of weights, with and without buffers, against the plain model's."""
    everyone = range(world.size)
    for kwargs in ({}, {"multi_avg_fn": get_ema_multi_avg_fn(0.75), "use_buffers": True}):
        plain, model = build(), shard(world, **options)
        plain_mean, mean = AveragedModel(plain, **kwargs), AveragedModel(model, **kwargs)
        plain_sgd, sgd = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (plain, model))
        for step in range(3):
            for rank in everyone:
                (loss_of(plain, *batch(step, rank)) / world.size).backward()
            loss_of(model, *batch(step, world.rank)).backward()
            for optimizer in (plain_sgd, sgd):
                optimizer.step()
                optimizer.zero_grad()
            for m in (plain, model):
                m.module.shift.add_(0.1) if m is model else m.shift.add_(0.1)
            plain_mean.update_parameters(plain)
            mean.update_parameters(model)
        found, now = mean.module.state_dict(), model.state_dict()
        assert not torch.equal(found["head.weight"], now["head.weight"])
        assert_states_close(found, plain_mean.module.state_dict(), rtol=1e-11, atol=1e-12)
        tokens, _ = batch(9, world.rank)
        with torch.no_grad():
            torch.testing.assert_close(mean(tokens), plain_mean(tokens), rtol=1e-10, atol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_averages_of_shards_are_the_average(layout) -> None:
    ec.run(averages, 3, args=({"layout": layout},))


def every_check(world: World) -> None:
    for options in OPTIONS:
        copies(world, options)
    averages(world, OPTIONS[1])
    outlives(world)
    freezes(world)


@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_copies_are_alone_in_other_worlds(kind) -> None:
    run_world(kind, every_check, 2)
