"""What ranks of an FSDP replicate is compared: small units, replicas of shards, everything."""

from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from tests.worlds import run_world

HYBRID = (ec.Strategy.HYBRID_SHARD, ec.Strategy.HYBRID_SHARD_ZERO2)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 40)).double()


def wrapped(world: ec.World, strategy: ec.Strategy, **options: Any) -> ec.FSDP:
    group = world.group
    if strategy.hybrid:
        mesh = world.mesh(replicate=2, shard=-1)
        group, options["replicate"] = mesh["shard"], mesh["replicate"]
    units = ec.units.by_type(nn.Linear)
    return ec.FSDP(net(), group, strategy=strategy, units=units, **options)


def step_with(model: ec.FSDP, optimizer: torch.optim.Optimizer, world: ec.World, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + world.rank)
    x = torch.randn(2, 4, dtype=torch.float64, generator=generator)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def change(model: ec.FSDP, name: str) -> None:
    with torch.no_grad():
        ec.local_shard(model.get_parameter(name)).add_(1.0)


# By what is replicated: options, the rank that changes alone, and what it changes.
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    "a small unit": ({"strategy": ec.Strategy.FULL_SHARD, "min_num_params": 200}, 0, "0.weight"),
    "a small unit, rows": (
        {"strategy": ec.Strategy.SHARD_GRAD_OP, "min_num_params": 200, "layout": "rows"},
        1,
        "0.bias",
    ),
    "a small unit in bfloat16": (
        {
            "strategy": ec.Strategy.SHARD_OPTIMIZER,
            "min_num_params": 200,
            "precision": ec.MixedPrecision(compute=torch.bfloat16),
        },
        1,
        "0.weight",
    ),
    "all": ({"strategy": ec.Strategy.NO_SHARD}, 1, "2.weight"),
    "a shard": ({"strategy": HYBRID[0], "min_num_params": 0}, 1, "2.weight"),
    "a shard, ZeRO-2": ({"strategy": HYBRID[1], "min_num_params": 0}, 0, "0.weight"),
    "a small unit of replicas": ({"strategy": HYBRID[0], "min_num_params": 200}, 0, "0.weight"),
}


def check(world: ec.World, case: str) -> None:
    options, changing, name = CASES[case]
    model = wrapped(world, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step_with(model, optimizer, world, 0)
    if world.rank == changing:
        change(model, name)
    with pytest.raises(ec.ModelMismatch, match=f"the values of parameter '{name}'") as info:
        step_with(model, optimizer, world, 1)  # the second reduction compares
    assert changing in info.value.found
    model.apply(lambda module: None)  # as the message says
    for step in range(2, 10):
        step_with(model, optimizer, world, step)


def unchecked(world: ec.World, case: str) -> None:
    options, changing, name = CASES[case]
    model = wrapped(world, **options, check_replicas=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        step_with(model, optimizer, world, step)
        if world.rank == changing:
            change(model, name)


@pytest.mark.parametrize("case", CASES)
def test_a_rank_that_changes_what_ranks_replicate_is_refused_on_all_ranks(case):
    run_world("threads", check, 4, (case,))


def check_all(world: ec.World) -> None:
    for case in CASES:
        check(world, case)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["processes", "gloo"])
def test_a_rank_that_changes_what_ranks_replicate_is_refused_over(kind):
    run_world(kind, check_all, 4)


@pytest.mark.parametrize("case", CASES)
def test_zero_compares_nothing(case):
    run_world("threads", unchecked, 4, (case,))


def late(world: ec.World) -> None:
    model = wrapped(world, ec.Strategy.NO_SHARD, check_replicas=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        step_with(model, optimizer, world, step)
    if world.rank:
        change(model, "0.bias")
    with pytest.raises(ec.ModelMismatch):
        step_with(model, optimizer, world, 2)


def test_the_option_says_after_how_many_reductions():
    run_world("threads", late, 2)


def sharded(world: ec.World) -> None:
    model = wrapped(world, ec.Strategy.FULL_SHARD, min_num_params=0)
    assert not model._hooks.reducer.replica_check.is_on


def test_what_only_one_rank_has_is_compared_with_nothing():
    run_world("threads", sharded, 2)
