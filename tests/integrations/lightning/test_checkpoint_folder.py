"""A path exists only with a complete step, and a save to it again replaces that step."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import echelon as ec
from echelon.integrations.lightning.checkpoint_folder import CheckpointFolder, remove_checkpoint


def saves(world: ec.World, path: str) -> Any:
    folder = CheckpointFolder(path, world.group)
    model = ec.DDP(torch.nn.Linear(2, 2), world.group)
    folder.save(7, {"model": model}, {"epoch": 1, "a/b": 2, "step": 3, "keep": [4]})
    first = sorted(os.listdir(path)), os.path.exists(path + ".saving")
    folder.save(7, {"model": model}, {"epoch": 2, "a/b": 2, "step": 3, "keep": [4]})
    values = folder.load({"model": model}, strict=True, rng=False)
    world.group.barrier()
    return first, sorted(os.listdir(path)), values


def test_values_of_any_key_come_back_and_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    values = {"epoch": 2, "a/b": 2, "step": 3, "keep": [4]}
    first = ([".lock", "step-000000007"], False)
    assert ec.run(saves, 2, args=(path,)) == [(first, [".lock", "step-000000008"], values)] * 2


def replaces(world: ec.World, path: str) -> list[int]:
    model = ec.DDP(torch.nn.Linear(2, 2), world.group)
    CheckpointFolder(path, world.group).save(1, {"model": model}, {})
    return ec.steps(path)


@pytest.mark.parametrize("is_file", [True, False])
def test_what_is_no_checkpoint_is_replaced(is_file: bool, tmp_path: Path) -> None:
    path, rest = tmp_path / "last.ckpt", tmp_path / "last.ckpt.saving" / "step-000000001"
    rest.mkdir(parents=True)
    if is_file:
        path.write_text("an older checkpoint in one file")
    else:
        path.mkdir()
    assert ec.run(replaces, 2, args=(str(path),)) == [[1], [1]]
    assert not rest.parent.exists()


def gives_a_bad_name(world: ec.World, path: str) -> None:
    model = ec.DDP(torch.nn.Linear(2, 2), world.group)
    CheckpointFolder(path, world.group).save(1, {"keep": model}, {})


def test_objects_need_a_name_and_paths_are_local(tmp_path: Path) -> None:
    with pytest.raises(ec.ArgumentError, match=r"\['keep'\] cannot be names of modules"):
        ec.run(gives_a_bad_name, 1, args=(str(tmp_path / "a.ckpt"),))
    with pytest.raises(ec.UnsupportedError, match=r"s3://a/b\.ckpt"):
        ec.run(gives_a_bad_name, 1, args=("s3://a/b.ckpt",))


def test_a_checkpoint_is_removed_whatever_it_is(tmp_path: Path) -> None:
    folder, link = tmp_path / "a.ckpt", tmp_path / "last.ckpt"
    (folder / "step-000000001").mkdir(parents=True)
    link.symlink_to(folder)
    remove_checkpoint(link)
    assert folder.is_dir()
    remove_checkpoint(folder)
    remove_checkpoint(folder)
    assert list(tmp_path.iterdir()) == []
