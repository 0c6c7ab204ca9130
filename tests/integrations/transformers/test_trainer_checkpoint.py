"""A checkpoint of a trainer is there completely, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import echelon as ec
from echelon.process import atomic_files

pytest.importorskip("transformers")


def write(world: ec.World, run: str, text: str) -> None:
    from echelon.integrations.transformers.trainer_checkpoint import new_folder

    with new_folder(Path(run), 3, world.group) as folder:
        assert not list(Path(run).glob("checkpoint-*/new"))
        (folder / f"{world.rank}").write_text(text)
        if world.rank == 0:
            (folder / "trainer_state.json").write_text("{}")
        if text == "fails" and world.rank == 1:
            raise OSError(errno.ENOSPC, "the disk is full")


def content(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_folder_is_visible_when_all_ranks_have_written(tmp_path: Path) -> None:
    (tmp_path / f".checkpoint-2.echelon-{'0' * 32}").mkdir()  # of a job that was killed
    (tmp_path / ".checkpoint-2").mkdir()  # of the user
    for text in ("a", "b"):  # the second replaces the first
        ec.run(write, 2, args=(str(tmp_path), text))
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {".checkpoint-2", "checkpoint-3"}
        written = {"0": text, "1": text, "trainer_state.json": "{}"}
        assert content(tmp_path / "checkpoint-3") == written


def test_a_failed_write_of_one_rank_is_an_error_on_all_and_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    ec.run(write, 2, args=(str(tmp_path), "a"))
    errors = ec.run(fails, 2, args=(str(tmp_path), "fails"))
    assert all("rank 1: " in error and "the disk is full (errno 28)" in error for error in errors)
    assert content(tmp_path / "checkpoint-3")["0"] == "a"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def fails(world: ec.World, run: str, text: str) -> str:
    with pytest.raises(ec.CheckpointError) as info:
        write(world, run, text)
    return str(info.value)


@pytest.mark.parametrize("kind", ["folder", "file", "link", "no exchange"])
def test_what_no_trainer_has_saved_is_not_replaced(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, text = tmp_path / "checkpoint-3", "no trainer has saved it, so it is not replaced"
    if kind == "folder":
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    elif kind == "file":
        place.write_text("mine")
    elif kind == "link":
        place.symlink_to(tmp_path)
    else:
        ec.run(write, 1, args=(str(tmp_path), "a"))
        monkeypatch.setattr(atomic_files, "_renameat2", lambda *_: errno.EINVAL)
        text = "this file system does not exchange two names"
    before = place.lstat().st_ino
    for error in ec.run(fails, 2, args=(str(tmp_path), "b")):
        assert text in error
    assert place.lstat().st_ino == before
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def test_checkpoints_go_by_the_numbers_of_their_steps(tmp_path: Path) -> None:
    from echelon.integrations.transformers.trainer_checkpoint import rotate

    def put(step: int, state: int | None = None) -> None:
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir(exist_ok=True)
        (folder / "trainer_state.json").write_text("{}")
        if state is not None:
            ec.save(folder / "echelon", step=state, value=1)
        os.utime(folder, (10**9 - step,) * 2)  # a clock that goes back

    for step in (9, 10, 11, 12, 100):
        put(step, step)
    put(7, 70)  # another one under this name
    put(8)
    (tmp_path / "checkpoint-2").mkdir()  # of the user
    (tmp_path / "checkpoint-3").symlink_to(tmp_path / "checkpoint-9")
    (tmp_path / "checkpoint-08").mkdir()
    (tmp_path / "checkpoint-08" / "trainer_state.json").write_text("{}")
    rotate(tmp_path, 12, 2, str(tmp_path / "checkpoint-9"))
    left = {path.name for path in tmp_path.iterdir()}
    theirs = {f"checkpoint-{name}" for name in ("2", "3", "7", "08")}
    assert left == {*theirs, "checkpoint-9", "checkpoint-12", "checkpoint-100"}
    rotate(tmp_path, 12, None, None)
    rotate(tmp_path, 12, 1, None)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*theirs, "checkpoint-12", "checkpoint-100"}


def test_a_checkpoint_without_the_state_of_a_training_is_named(tmp_path: Path) -> None:
    from echelon.integrations.transformers.trainer_checkpoint import state_folder

    with pytest.raises(ec.CheckpointNotFound, match="save_only_model=True"):
        state_folder(tmp_path)
