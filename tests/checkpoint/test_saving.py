"""A step is never replaced if it is whole, and always if it is damaged."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint import saving
from echelon.comm.world import World
from echelon.errors import CheckpointError
from tests.checkpoint.disks import Act, Call, Disk

SAVES = {"save": ec.save, "async_save": ec.async_save}


def test_a_copy_that_is_on_the_path_and_not_installed_saves_with_its_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def not_installed(package: str) -> str:
        raise metadata.PackageNotFoundError(package)

    for module in (metadata, saving):
        monkeypatch.setattr(module, "version", not_installed, raising=False)
    step = ec.save(tmp_path, step=1, value=1)
    manifest = json.loads((step / "manifest.json").read_text())
    assert manifest["versions"]["echelon"] == ec.__version__


def test_a_step_that_is_whole_is_never_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    kept = ec.save(tmp_path, step=1, model=model)
    files = {path.name: path.read_bytes() for path in kept.iterdir()}
    with torch.no_grad():
        model.weight.zero_()
    for save in SAVES.values():
        with pytest.raises(CheckpointError, match=r"go on from it by ec\.load, or save under"):
            save(tmp_path, step=1, model=model)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == files


def saves_into_a_step(world: World, folder: str) -> None:
    model = ec.DDP(nn.Linear(2, 2), world.group)
    kept = ec.save(folder, step=1, model=model)
    world.group.barrier()
    link = Path(folder) / "link"
    if world.rank == 0:
        link.symlink_to(kept)
    for inside in (kept, kept / "later" / "run", link):
        for save in SAVES.values():
            with pytest.raises(CheckpointError, match="this is a step that was saved"):
                save(inside, step=2, model=model)
    assert ec.load(kept, model=model).step == 1


def test_nothing_is_saved_into_a_step(tmp_path: Path) -> None:
    ec.run(saves_into_a_step, 2, args=(str(tmp_path),))


def flip(step: Path) -> None:
    file = step / "rank-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def empty(step: Path) -> None:
    for path in step.iterdir():
        path.unlink()


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(step: Path) -> None:
        step.rename(step.with_name("aside"))
        make(step)

    return act


@pytest.mark.parametrize(
    "damage",
    [
        flip,
        empty,
        replace_by(lambda step: step.symlink_to(step.with_name("aside"))),
        replace_by(lambda step: step.symlink_to("nowhere")),
        replace_by(lambda step: step.write_text("a file")),
        replace_by(os.mkfifo),
    ],
    ids=["flipped", "empty", "link", "broken link", "file", "pipe"],
)
def test_a_step_that_is_damaged_is_replaced(
    damage: Callable[[Path], object], tmp_path: Path
) -> None:
    model = nn.Linear(2, 2)
    ec.save(tmp_path, step=2, model=nn.Linear(2, 2))
    damage(tmp_path / "step-000000002")
    ec.save(tmp_path, step=2, model=model)
    found = nn.Linear(2, 2)
    ec.load(tmp_path, model=found)
    assert torch.equal(found.weight, model.weight)
    ec.save(tmp_path, step=3, model=model)
    names = {path.name for path in tmp_path.iterdir()} - {"aside"}
    assert names == {".lock", "step-000000002", "step-000000003"}


class OneAfterTheOther:
    """Holds the save of rank 0 until that of rank 1 has failed."""

    def __init__(self, world: World) -> None:
        self.world = world

    def __call__(self, call: Call, act: Act, part: Act) -> Any:
        if (call.op, call.what, call.rank) == ("open", "rank file", 0):
            self.world.group.barrier()  # rank 1 may begin
            self.world.group.barrier()  # it has failed
        return act()


def save_without_group(world: World, folder: Path, together: bool) -> str:
    model = nn.Linear(2, 2)
    text = ""
    if together and world.rank == 0:
        with Disk(OneAfterTheOther(world)):
            ec.save(folder, step=1, model=model)
    elif world.rank == 0:
        ec.save(folder, step=1, model=model)
        world.group.barrier()
        world.group.barrier()
    else:
        world.group.barrier()
        with pytest.raises(CheckpointError) as info:
            ec.save(folder, step=1, model=model)
        text = str(info.value)
        world.group.barrier()
    ec.save(folder, step=2, model=model, group=world.group)
    return text


@pytest.mark.parametrize("together", [False, True])
def test_ranks_that_save_a_plain_model_without_a_group_are_told_to_give_it(
    together: bool, tmp_path: Path
) -> None:
    text = ec.run(save_without_group, 2, args=(tmp_path, together))[1]
    assert text.endswith(
        "Ranks that share a plain model save it together: give group= on all of them"
    )
    assert ("is under way" if together else "was saved already") in text
    assert ec.steps(tmp_path) == [1, 2]
