"""What is not as it was written is refused by all ranks, before anything has changed.

A hundred flips and twenty cuts of several layouts are in ``tests/long/test_corruption.py``.
"""

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint.convert.step_files import tree_of
from echelon.comm.world import World
from echelon.errors import CheckpointMismatch, CheckpointNotFound
from tests.checkpoint.damage import (
    NEW,
    OLD,
    Damage,
    check_damages,
    cut,
    empty,
    extra,
    flip,
    missing,
    save_steps,
    swap,
    tensor_at,
)
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.whole import check_equal, whole_state
from tests.pipeline.tied_stages import decoder, tied_stages

MANIFEST, FIRST, SECOND = "manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"
FILES = (MANIFEST, FIRST, SECOND)


def flips(step: Path) -> list[Damage]:
    """Spread over each file: its first and last bit, and some between."""
    found = []
    for file in FILES:
        num_bits = (step / file).stat().st_size * 8
        for bit in (0, num_bits // 2, num_bits * 6 // 7, num_bits - 1):
            found.append(flip(file, bit, tensor_at(step, file, bit // 8)))
    assert sum(one.tensor is not None for one in found) >= 5
    return found


def others(step: Path) -> Sequence[Damage]:
    return (
        cut(MANIFEST, 1000),
        cut(SECOND, (step / SECOND).stat().st_size - 1),
        empty(MANIFEST),
        empty(FIRST),
        missing(MANIFEST),
        missing(SECOND),
        extra("rank-00002.safetensors"),
        swap(FIRST, SECOND),
        swap(MANIFEST),
        swap(SECOND),
    )


@pytest.mark.slow
@pytest.mark.parametrize("damages", [flips, others])
def test_a_damage_is_named_and_changes_nothing_and_the_step_before_is_loaded(
    damages: object, tmp_path: Path
) -> None:
    check_damages("fsdp2", tmp_path, damages, every=3)


def load_what_is_left(world: World, folder: Path) -> None:
    trainee = LAYOUTS["plain"].trainee(world, seed=1)
    before = copy.deepcopy(whole_state(trainee))
    with pytest.raises(CheckpointNotFound, match="no step is whole") as info:
        ec.load(folder, model=trainee.model, optimizer=trainee.optimizer, fallback=True)
    assert "step-000000004" in str(info.value)
    assert "step-000000007" in str(info.value)
    check_equal(whole_state(trainee), before)


def test_where_no_step_is_whole_none_is_loaded(tmp_path: Path) -> None:
    ec.run(save_steps, 1, args=("plain", tmp_path))
    for step in (OLD, NEW):
        (tmp_path / f"step-{step:09}" / FIRST).unlink()
    with pytest.warns(UserWarning, match="a damaged checkpoint was passed over"):
        ec.run(load_what_is_left, 1, args=(tmp_path,))


HEAD = "head.weight"


def load_tied(world: World, folder: Path, plan: ec.Plan) -> None:
    """Of a model in stages, each rank has one of the two names."""
    staged = plan.pp > 1
    model: Any = tied_stages(plan, world)[1] if staged else ec.parallelize(decoder(), plan, world)
    for param in model.parameters():
        nn.init.zeros_(param)
    ec.load(folder, step=1, model=model)
    state = model.whole_state_dict() if plan.num_ranks > 1 else model.state_dict()
    check_equal(state, decoder().state_dict())
    with pytest.raises(CheckpointMismatch, match="saved apart: 4 of 124 elements") as caught:
        ec.load(folder, step=2, model=model)
    for found in (caught.value, ec.load(folder, step=2, model=model, strict=False)):
        assert [*found.missing, *found.unexpected, *found.differing] == [f"model/{HEAD}"]


@pytest.mark.parametrize("plan", ["dp=1", "dp=2", "shard=3", "pp=2"])
def test_names_saved_apart_are_loaded_into_one_tensor_if_their_values_are_equal(
    plan: str, tmp_path: Path
) -> None:
    parsed = ec.Plan.parse(plan, **({"microbatches": 3} if plan == "pp=2" else {}))
    state = decoder().state_dict()
    ec.save(tmp_path, step=1, model=tree_of(state))
    state[HEAD] = state[HEAD].index_fill(0, torch.tensor(0), 0.0)
    ec.save(tmp_path, step=2, model=tree_of(state))
    ec.run(load_tied, parsed.num_ranks, args=(tmp_path, parsed))
