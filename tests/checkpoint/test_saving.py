"""What is replaced: a damaged step always, a whole one or one of others only on request."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn

import echelon as ec
from echelon.checkpoint import files, saving
from echelon.comm.world import World
from echelon.errors import CheckpointError
from echelon.process import atomic_files
from tests.checkpoint.disks import Act, Call, Disk
from tests.checkpoint.stores import store

__all__ = ["store"]  # a fixture

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


def add_file(step: Path) -> None:
    (step / "mine.txt").write_text("mine")


def make_folder_of_user(step: Path) -> None:
    step.mkdir()
    (step / "thesis.tex").write_text("mine")
    (step / "figures").mkdir()


def make_folder_in_place_of_a_file(step: Path) -> None:
    (step / "rank-00000.safetensors").unlink()
    (step / "rank-00000.safetensors").mkdir()


_NO_FOLDER = "is no folder, so no save has written it, and it is not replaced: move it away"
_NO_SAVE = "has files that no save has written, so it is not replaced: move away "
FOREIGN = {
    "link": (replace_by(lambda step: step.symlink_to(step.with_name("aside"))), _NO_FOLDER),
    "broken link": (replace_by(lambda step: step.symlink_to("nowhere")), _NO_FOLDER),
    "file": (replace_by(lambda step: step.write_text("a file")), _NO_FOLDER),
    "pipe": (replace_by(os.mkfifo), _NO_FOLDER),
    "a file more": (add_file, f"{_NO_SAVE}mine.txt, or save under another step"),
    "a folder of the user": (
        replace_by(make_folder_of_user),
        f"{_NO_SAVE}figures, thesis.tex, or save under another step",
    ),
    "a folder in place of a file": (
        make_folder_in_place_of_a_file,
        f"{_NO_SAVE}rank-00000.safetensors, or",
    ),
}


@pytest.mark.parametrize(
    "damage",
    [flip, empty],
    ids=["flipped", "empty"],
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
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "step-000000002", "step-000000003"}


@pytest.mark.parametrize(("make", "named"), FOREIGN.values(), ids=FOREIGN)
def test_what_no_save_has_written_is_not_replaced_though_the_user_says_overwrite(
    make: Callable[[Path], object], named: str, tmp_path: Path
) -> None:
    step = ec.save(tmp_path, step=2, model=nn.Linear(2, 2))
    assert isinstance(step, Path)
    make(step)
    before = {path: path.lstat().st_ino for path in tmp_path.rglob("*")}
    for save in SAVES.values():
        for overwrite in (False, True):
            with pytest.raises(CheckpointError, match=named) as info:
                save(tmp_path, step=2, model=nn.Linear(2, 2), overwrite=overwrite)
            assert str(step) in str(info.value)
            assert "overwrite=True" not in str(info.value)
    assert {path: path.lstat().st_ino for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_an_overwritten_step_is_the_newest_and_what_nobody_saved_stays(
    save: Callable[..., object], tmp_path: Path
) -> None:
    for step in (1, 2, 3, 4):
        ec.save(tmp_path, step=step, value=step)
    (tmp_path / ".saving-notes").mkdir()
    mine = tmp_path / "step-000000004" / "mine.txt"
    mine.write_text("mine")
    words = "comes after step 2, which is to be overwritten, .* move away mine.txt"
    with pytest.raises(CheckpointError, match=words):
        save(tmp_path, step=2, value=20, overwrite=True)
    mine.unlink()
    save(tmp_path, step=2, value=20, overwrite=True)
    ec.load(tmp_path)  # when it is saved
    assert ec.steps(tmp_path) == [1, 2]
    add_file(tmp_path / "step-000000001")
    assert ec.load(tmp_path, step=2).values == {"value": 20}
    ec.save(tmp_path, step=5, value=5, keep=1)
    assert ec.steps(tmp_path) == [1, 5]
    names = {".lock", ".saving-notes", "step-000000001", "step-000000005"}
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_file_system_without_an_exchange_refuses_to_overwrite_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec.save(tmp_path, step=1, value=1)
    for code in (errno.EINVAL, errno.ENOSYS, errno.EXDEV):
        monkeypatch.setattr(atomic_files, "_renameat2", lambda *_, code=code: code)
        with pytest.raises(CheckpointError) as info:
            ec.save(tmp_path, step=1, value=2, overwrite=True)
        assert info.value.errno == (errno.EXDEV if code == errno.EXDEV else errno.ENOTSUP)
        assert ec.load(tmp_path).values == {"value": 1}
    ec.save(tmp_path, step=2, value=2)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock", "step-000000001", "step-000000002"
    }  # fmt: skip


@pytest.mark.parametrize(("overwrite", "which"), [(False, "an older"), (True, "a later")])
def test_a_store_that_removes_no_step_is_an_error_that_says_that_the_new_one_is_saved(
    store: str, monkeypatch: pytest.MonkeyPatch, overwrite: bool, which: str
) -> None:
    for step in (1, 3):
        ec.save(store, step=step, value=step)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Access Denied")

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "rm_file", refuse)
    with pytest.raises(CheckpointError, match="Access Denied") as info:
        ec.save(store, step=2, value=2, keep=1, overwrite=overwrite)
    words = f"{store}/step-000000002: is saved; but {which} step could not be removed"
    assert words in str(info.value)
    assert info.value.errno == errno.EACCES
    assert ec.load(store, step=2).values == {"value": 2}


def prepares(world: World, folder: str, after: int | None) -> str:
    try:
        ec.prepare_run(folder, after=after, group=world.group)
    except CheckpointError as error:
        return str(error)
    return "fine"


def test_a_run_that_would_overwrite_is_told_at_its_start_on_all_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"

    def told(after: int | None) -> str:
        (text,) = {*ec.run(prepares, 2, args=(str(folder), after))}
        return text

    assert told(None) == "fine"
    assert folder.is_dir()
    for step in (10, 20):
        ec.save(folder, step=step, value=1)
    assert "begins, and the folder has 2 steps, up to 20 already" in told(None)
    assert "goes on after step 10, and the folder has step 20 already" in told(10)
    assert told(20) == "fine"
    assert (
        "this is a step that was saved"
        in ec.run(prepares, 1, args=(str(folder / "step-000000010"), None))[0]
    )
    files.claim(folder, "lightning")
    for text in (told(20), *(raised_by(save, folder) for save in SAVES.values())):
        assert "holds steps that a strategy for Lightning has saved" in text


def raised_by(save: Callable[..., object], folder: Path) -> str:
    with pytest.raises(CheckpointError) as info:
        save(folder, step=30, value=1)
    return str(info.value)


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
