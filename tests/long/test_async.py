"""Saves beside training, many times over, in every world."""

from __future__ import annotations

import copy
import errno
import sys
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon.comm.world import World
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.scripts import ENDS, WORLDS, run_script
from tests.checkpoint.test_async_save import given, save_many
from tests.checkpoint.whole import check_equal, whole_state
from tests.worlds import KINDS, run_world

NUM_SAVES, NUM_SNAPSHOTS, NUM_ENDS = 50, 20, 10


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_saves_one_after_another(kind: str, tmp_path: Path) -> None:
    assert run_world(kind, save_many, 2, (tmp_path, NUM_SAVES)) == [3, 3]


def snapshots(world: World, layout: str, folder: Path) -> None:
    """Change all there is as soon as the call returns, while a large file is being written."""
    trainee = LAYOUTS[layout].trainee(world)
    large = torch.zeros(1 << 20)
    for step in range(NUM_SNAPSHOTS):
        trainee.train(step)
        large.fill_(step)
        expected = copy.deepcopy(whole_state(trainee))
        saving = ec.async_save(folder, step=step, large=large, **given(trainee))
        large.fill_(-1)
        with torch.no_grad():
            for param in trainee.model.parameters():
                param.neg_()
        for own in trainee.optimizer.state.values():
            for value in own.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
        saving.wait()
        loaded = ec.load(folder, **given(trainee))
        check_equal(whole_state(trainee), expected)
        assert torch.all(loaded.values["large"] == step)


@pytest.mark.parametrize("layout", ["ddp2", "fsdp2", "hybrid4", "pp2-dp2"])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_twenty_snapshots_are_exact(kind: str, layout: str, tmp_path: Path) -> None:
    ec.run(snapshots, LAYOUTS[layout].ranks, kind, args=(layout, tmp_path))


@pytest.mark.parametrize("again", range(NUM_ENDS))
@pytest.mark.parametrize("world", WORLDS)
def test_a_script_whose_save_fails_never_ends_well(world: str, again: int, tmp_path: Path) -> None:
    end = list(ENDS)[again % 3]
    if world == "alone" and end == "closes":
        end = "ends"
    code, text = run_script(tmp_path, world=world, end=end, full=True)
    assert code != 0
    assert f"File too large (errno {errno.EFBIG})" in text


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("world", WORLDS)
def test_a_script_ends_when_its_save_is_committed(world: str, end: str, tmp_path: Path) -> None:
    assert run_script(tmp_path, world=world, end=end, full=False) == (0, "")


@pytest.mark.parametrize("full", [False, True])
def test_a_job_under_torchrun_ends_as_its_save_does(full: bool, tmp_path: Path) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    # Not over shared memory: that is made of files, which would find no room, either.
    code, text = run_script(tmp_path, world="over gloo", end="ends", full=full, launcher=launcher)
    assert (code != 0) == full, text
    assert (f"File too large (errno {errno.EFBIG})" in text) == full
