"""A path exists only with a complete step, and a save to it again replaces that step."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

import echelon as ec
from echelon.integrations.lightning.checkpoint_folder import CheckpointFolder


def saves(world: ec.World, path: str) -> Any:
    folder = CheckpointFolder(path, world.group)
    model = ec.DDP(torch.nn.Linear(2, 2), world.group)
    folder.save(7, {"model": model}, {"epoch": 1, "a/b": 2, "step": 3, "keep": [4]})
    first = sorted(os.listdir(path)), os.listdir(os.path.dirname(path))
    world.group.barrier()
    folder.save(7, {"model": model}, {"epoch": 2, "a/b": 2, "step": 3, "keep": [4]})
    values = folder.load({"model": model}, strict=True, rng=False)
    world.group.barrier()
    return first, sorted(os.listdir(path)), values


def test_values_of_any_key_come_back_and_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "last.ckpt")
    values = {"epoch": 2, "a/b": 2, "step": 3, "keep": [4]}
    ours = [".lock", ".written-by-lightning"]
    first = ([*ours, "step-000000007"], [Path(path).name])
    assert ec.run(saves, 2, args=(path,)) == [(first, [*ours, "step-000000008"], values)] * 2


def replaces(world: ec.World, path: str) -> list[int]:
    model = ec.DDP(torch.nn.Linear(2, 2), world.group)
    CheckpointFolder(path, world.group).save(1, {"model": model}, {})
    return ec.steps(path)


def put_run(path: Path) -> None:
    ec.save(path, step=9, value=1)


def put_files(path: Path) -> None:
    (path / "thesis").mkdir(parents=True)
    (path / "thesis" / "data.txt").write_text("years of work")


MAKE: dict[str, Any] = {
    "nothing": lambda path: None,
    "an empty folder": lambda path: path.mkdir(),
    "a file of Lightning's": lambda path: torch.save({"epoch": 1}, path),
    "a link": lambda path: path.symlink_to(path.with_name("other")),
    "a link that leads nowhere": lambda path: path.symlink_to("nowhere"),
    "a folder of the user": put_files,
    "a run of ec.save": put_run,
    "a file of the user": lambda path: path.write_text("mine"),
    "a pipe": os.mkfifo,
}


def everything(folder: Path) -> dict[str, str]:
    """All that is below a folder, with the content of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes().hex() if path.is_file() else "-"
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("what", MAKE)
def test_what_lightning_has_not_saved_is_neither_replaced_nor_removed(
    what: str, tmp_path: Path
) -> None:
    path = tmp_path / "last.ckpt"
    put_files(tmp_path / "other")
    put_files(tmp_path / "last.ckpt.saving")  # of the user, whatever it is called
    abandoned = tmp_path / f".last.ckpt.echelon-{'0' * 32}"  # by a save that was killed
    MAKE[what](path)
    before = everything(tmp_path)
    if [*MAKE].index(what) < 5:
        abandoned.mkdir()
        assert ec.run(replaces, 2, args=(str(path),)) == [[1], [1]]
        assert not path.is_symlink()
        assert not abandoned.exists()
        names = {"other", "last.ckpt.saving", "last.ckpt"}
        assert {each.name for each in tmp_path.iterdir()} == names
    else:
        with pytest.raises(ec.CheckpointError, match="so it is not replaced: save to another path"):
            ec.run(replaces, 2, args=(str(path),))
        assert everything(tmp_path) == before
        with pytest.warns(UserWarning, match="was not removed"):
            ec.run(removes, 1, args=(str(path),))
        assert everything(tmp_path) == before
    assert (tmp_path / "other" / "thesis" / "data.txt").read_text() == "years of work"


def removes(world: ec.World, path: str) -> None:
    CheckpointFolder(path, world.group).remove()


def gives_a_bad_name(world: ec.World, path: str) -> None:
    model = ec.DDP(torch.nn.Linear(2, 2), world.group)
    CheckpointFolder(path, world.group).save(1, {"keep": model}, {})


def test_objects_need_a_name_and_paths_are_local(tmp_path: Path) -> None:
    with pytest.raises(ec.ArgumentError, match=r"\['keep'\] cannot be names of modules"):
        ec.run(gives_a_bad_name, 1, args=(str(tmp_path / "a.ckpt"),))
    with pytest.raises(ec.UnsupportedError, match=r"s3://a/b\.ckpt"):
        ec.run(gives_a_bad_name, 1, args=("s3://a/b.ckpt",))


def test_a_checkpoint_is_removed_but_for_files_of_others(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.ckpt", "b.ckpt", "file.ckpt", "link.ckpt")]
    for path in paths[:2]:
        ec.run(replaces, 1, args=(str(path),))
    (paths[1] / "notes.txt").write_text("mine")
    torch.save({}, paths[2])
    paths[3].symlink_to(paths[1])
    for path in (paths[0], *paths[2:], paths[0]):
        ec.run(removes, 1, args=(str(path),))
    assert [*tmp_path.iterdir()] == [paths[1]]
    with pytest.warns(UserWarning, match="was not removed"):
        ec.run(removes, 1, args=(str(paths[1]),))
    assert ec.steps(paths[1]) == []
    assert (paths[1] / "notes.txt").read_text() == "mine"
