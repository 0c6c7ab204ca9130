"""What is not as it was written is refused by all ranks, before anything has changed.

A hundred flips and twenty cuts of several layouts are in ``tests/long/test_corruption.py``.
"""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest

import echelon as ec
from echelon.comm.world import World
from echelon.errors import CheckpointNotFound
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
