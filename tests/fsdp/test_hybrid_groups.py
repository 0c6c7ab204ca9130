"""Hybrid sharding: parts inside one axis of a mesh, replicas along another."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import echelon as ec
from tests.fsdp.models import Block, batch, build, loss_of, train_plain
from tests.fsdp.test_seeds import Weights
from tests.reference import assert_states_close
from tests.worlds import KINDS, run_world

HYBRID = [strategy for strategy in ec.Strategy if strategy.hybrid]
STEPS = 3


def wrap(module: torch.nn.Module, mesh: ec.Mesh, **options: Any) -> ec.FSDP:
    options = {"strategy": ec.Strategy.HYBRID_SHARD, "min_num_params": 0, **options}
    return ec.FSDP(module, mesh["shard"], replicate=mesh["replicate"], **options)


def the_seeds_numbers(world: ec.World) -> None:
    mesh = world.mesh(replicate=2, shard=2)
    node, place = mesh.coordinates["replicate"], mesh.coordinates["shard"]
    for strategy in HYBRID:
        model = wrap(Weights([10.0, 20.0, 30.0, 40.0]), mesh, strategy=strategy)
        assert ec.local_shard(model.w).tolist() == [[10.0, 20.0], [30.0, 40.0]][place]
        x = [[2.0, 4.0, 6.0, 8.0], [10.0, 20.0, 30.0, 40.0]][node]
        model(torch.tensor(x)).sum().backward()
        assert ec.local_shard(model.w.grad).tolist() == [[6.0, 12.0], [18.0, 24.0]][place]
        info = [(one.start, one.size) for one in model.shard_info("w")]
        assert info == [(0, 2), (2, 2)]
        assert model.local_sharding_ratio() == 0.5
    with pytest.raises(ec.ArgumentError, match="the group has 4"):
        world.mesh(replicate=-1, shard=3)


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_two_nodes_of_two_ranks(kind: str) -> None:
    run_world(kind, the_seeds_numbers, 4)


def train(world: ec.World, replicas: int, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The whole state after some steps."""
    mesh = world.mesh(replicate=replicas, shard=-1)
    model = wrap(build(seed=world.rank), mesh, units=ec.units.by_type(Block), **options)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(STEPS):
        loss = loss_of(model, *batch(step, world.rank))
        if step == 1:  # kept whole, and reduced by hand
            with model.no_sync():
                loss.backward()
            model.sync_gradients()
        else:
            loss.backward()
        ec.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train_all(world: ec.World, replicas: int, every: list[dict[str, Any]]) -> list[Any]:
    return [train(world, replicas, options) for options in every]


COMBINATIONS = [
    {"strategy": strategy, "layout": layout, "min_num_params": least}
    for (strategy, layout), least in zip(
        itertools.product(HYBRID, ("flat", "rows")), (0, 100, 100, 0), strict=True
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "replicas"),
    [
        *(("threads", *shape) for shape in ((4, 2), (6, 2), (6, 3), (2, 2), (2, 1))),
        *((kind, 4, 2) for kind in KINDS[1:]),
    ],
)
def test_training_equals_one_process(kind: str, ranks: int, replicas: int) -> None:
    expected, _ = train_plain(ranks, STEPS, clip=0.1)
    for found in run_world(kind, train_all, ranks, (replicas, COMBINATIONS)):
        for state in found:
            assert_states_close(state, expected, rtol=1e-11, atol=1e-12)


def unused_in_one_group(world: ec.World) -> None:
    """A parameter that only the ranks of the second group use still gets its mean."""
    mesh = world.mesh(replicate=2, shard=2)
    place, node = mesh.coordinates["shard"], mesh.coordinates["replicate"]
    model = torch.nn.Sequential(Weights([1.0] * 4), Weights([2.0] * 4))
    model.forward = lambda x: model[0](x) + (model[1](2 * x) if node else 0)
    wrapped = wrap(model, mesh, layout="rows")
    wrapped(torch.arange(4.0)).sum().backward()
    assert ec.local_shard(model[0].w.grad).tolist() == [[0.0, 1.0], [2.0, 3.0]][place]
    assert ec.local_shard(model[1].w.grad).tolist() == [[0.0, 1.0], [2.0, 3.0]][place]  # half of 2x


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_that_one_group_uses_gets_its_mean_everywhere(kind: str) -> None:
    run_world(kind, unused_in_one_group, 4)


def refuses(world: ec.World) -> None:
    mesh = world.mesh(replicate=2, shard=2)
    for strategy, replicate in (
        (ec.Strategy.HYBRID_SHARD, None),
        (ec.Strategy.FULL_SHARD, mesh["replicate"]),
        (ec.Strategy.HYBRID_SHARD, "replicate"),
    ):
        with pytest.raises(ec.ArgumentError, match=r"world.mesh\(replicate=-1, shard=8\)"):
            ec.FSDP(Weights([1.0]), mesh["shard"], strategy=strategy, replicate=replicate)
    for other in (world.group, mesh["shard"]):
        with pytest.raises(ec.ArgumentError, match="share more than this rank"):
            ec.FSDP(
                Weights([1.0]), mesh["shard"], strategy=ec.Strategy.HYBRID_SHARD, replicate=other
            )


def test_groups_that_are_no_mesh_are_refused() -> None:
    ec.run(refuses, 4)


def differs(world: ec.World) -> None:
    mesh = world.mesh(replicate=2, shard=2)
    wrap(Weights([1.0] * (3 if world.rank == 3 else 4)), mesh)


def test_models_that_differ_between_replicas_are_named() -> None:
    with pytest.raises(ec.ModelMismatch, match="parameter 'w'"):
        ec.run(differs, 4)
