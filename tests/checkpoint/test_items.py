"""The group of all ranks that share what is saved, and how often modules are asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import echelon as ec
from echelon.comm.mesh import Mesh
from echelon.comm.world import World
from echelon.errors import ArgumentError
from echelon.state.sharded_state import HasShards, ParameterShards, ShardedState
from tests.holding import shared_group
from tests.pipeline.models import mse
from tests.worlds import run_world


@pytest.mark.slow
def test_a_save_and_a_load_ask_each_holder_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    for kind in (ec.Pipeline, ec.FSDP, ec.DDP):

        def counted(
            self: Any, plain: Callable[[Any], ShardedState] = kind.holdings
        ) -> ShardedState:
            asked.append((type(self).__name__, id(self)))
            return plain(self)

        monkeypatch.setattr(kind, "holdings", counted)

    def main(world: World, one: ec.Plan) -> None:
        pipe = ec.parallelize([nn.Linear(2, 2), nn.Linear(2, 2)], one, world, loss_fn=mse)
        model = nn.ModuleDict({"a": pipe, "b": pipe})
        for act in (ec.save, ec.load):
            asked.clear()
            world.group.barrier()
            act(tmp_path / str(one.dp), step=1, model=model)
            world.group.barrier()
            assert len(asked) == len(set(asked)) == 2 * world.size
            world.group.barrier()

    for options in ({"dp": 2}, {"shard": 2}):
        one = ec.Plan(pp=2, microbatches=2, **options)
        run_world("threads", main, 4, (one,))


# --- the group -----------------------------------------------------------------------------------


def ddp(group: ec.Group) -> nn.Module:
    return ec.DDP(nn.Linear(2, 2), group)


@pytest.mark.slow
def test_the_group_is_that_of_the_axes_or_the_nearest_they_come_from() -> None:
    def main(world: World) -> None:
        halves = [world.group.subgroup(range(4)), world.group.subgroup(range(4, 8))]
        group = halves[world.rank // 4]
        assert group is not None
        outer = world.mesh(pp=2, dp=2, shard=2)
        inner = Mesh(group, {"replicate": 2, "shard": 2})

        def fsdp(mesh: ec.Mesh, replicate: str) -> nn.Module:
            hybrid = ec.Strategy.HYBRID_SHARD
            return ec.FSDP(
                nn.Linear(2, 2), mesh["shard"], replicate=mesh[replicate], strategy=hybrid
            )

        assert shared_group([ddp(outer["dp"])]) is outer["dp"]
        assert shared_group([ddp(world.group)]) is world.group
        assert shared_group([fsdp(inner, "replicate")]) is group
        both = nn.Sequential(fsdp(outer, "dp"), ddp(outer["pp"]))
        assert shared_group([both]) is world.group
        # Axes inside of another count with that.
        assert shared_group([fsdp(inner, "replicate"), ddp(world.group)]) is world.group
        assert shared_group([ddp(inner["shard"]), nn.Linear(1, 1)]) is inner["shard"]

    run_world("threads", main, 8)


def test_a_group_that_is_given_counts_if_it_has_all_ranks() -> None:
    def main(world: World) -> None:
        mesh = world.mesh(dp=2, other=2)
        model = ddp(mesh["dp"])
        assert shared_group([model], world.group) is world.group
        assert shared_group([nn.Linear(1, 1)], world.group) is world.group
        with pytest.raises(ArgumentError, match=r"group has ranks .* shared with ranks"):
            shared_group([model], mesh["other"])
        with pytest.raises(ArgumentError, match="group is 'world'"):
            shared_group([model], "world")

    run_world("threads", main, 4)


def test_a_rank_alone_needs_no_group() -> None:
    assert shared_group([nn.Linear(1, 1)]) is None
    assert shared_group([]) is None


class Shared(nn.Module, HasShards):
    """Of a library that is not ours."""

    def __init__(self, group: ec.Group | None) -> None:
        super().__init__()
        assert group is not None
        self._group = group

    def holdings(self) -> ShardedState:
        return ShardedState(tensors=(), params={}, axes=self.shared_over())

    def parameter_shards(self) -> tuple[ParameterShards, ...]:
        return ()

    def shared_over(self) -> tuple[ec.Group, ...]:
        return (self._group,)


def test_a_group_that_cannot_be_found_is_asked_for() -> None:
    def main(world: World) -> None:
        first = world.group.subgroup([0, 1])
        second = world.group.subgroup([0, 2])
        if world.rank == 0:
            # They could be two axes of four ranks, but nothing here has four.
            with pytest.raises(ArgumentError, match=r"which makes 4 ranks.*give group="):
                shared_group([Shared(first), Shared(second)])

    run_world("threads", main, 5)
