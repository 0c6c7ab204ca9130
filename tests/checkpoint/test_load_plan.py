"""What a step gives to a rank, and what it may ask of its memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.checkpoint.load_plan import LoadPlan
from echelon.checkpoint.saved_step import SavedStep
from echelon.comm.world import World
from echelon.errors import CheckpointCorrupt
from echelon.state.tensor_shard import Replication, TensorShard


def save(world: World, folder: Path) -> None:
    ec.save(
        folder, step=1, group=world.group, rng=False, values={"w": torch.full((3,), world.rank)}
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of two ranks, each with values of its own."""
    folder = tmp_path_factory.mktemp("run")
    ec.run(save, 2, args=(folder,))
    return folder / "step-000000001"


def plan_of(folder: Path, rank: int, size: int) -> LoadPlan:
    with SavedStep(folder) as step:
        return LoadPlan(manifest=step.manifest, path=str(folder), rank=rank, size=size)


SHARD = TensorShard(
    names=("other", "values/w"),
    shape=(3,),
    start=0,
    values=torch.zeros(3, dtype=torch.int64),
    replication=Replication.PER_RANK,
)


@pytest.mark.parametrize(("size", "name"), [(2, "own/1/values/w"), (3, "values/w")])
def test_a_rank_gets_its_own_values_if_as_many_ranks_load(
    saved: Path, size: int, name: str
) -> None:
    plan = plan_of(saved, 1, size)
    plan.add_read(SHARD)
    assert [item.saved.name for item in plan.in_place] == [name]
    assert plan.used == {"values/w"}
    assert plan.not_restored == ([] if size == 2 else ["values/w"])
    assert not plan.missing
    assert not plan.differing


@pytest.mark.parametrize(
    ("changes", "dtype", "missing", "problem"),
    [
        ({"names": ("other",)}, torch.int64, ["other"], None),
        ({"shape": (4,)}, torch.int64, [], "saved as [3], here [4]"),
        ({}, torch.bool, [], "saved as torch.int64, here torch.bool"),
    ],
)
def test_what_does_not_fit_is_recorded_and_not_read(
    saved: Path, changes: dict, dtype: torch.dtype, missing: list[str], problem: str | None
) -> None:
    plan = plan_of(saved, 0, 2)
    shard = replace(SHARD, **changes)
    assert plan.match(shard, dtype) is None
    assert plan.missing == missing
    assert plan.differing == ({} if problem is None else {shard.name: problem})


def test_a_step_may_ask_for_sixteen_times_its_own_bytes(saved: Path) -> None:
    plan = plan_of(saved, 0, 2)
    plan.count_new_memory(16 * 2 * 24)
    with pytest.raises(CheckpointCorrupt, match="768 bytes of memory, which is 16 times"):
        plan.count_new_memory(1)
