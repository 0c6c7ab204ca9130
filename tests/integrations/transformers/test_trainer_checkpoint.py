"""A checkpoint of a trainer is there completely, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

import echelon as ec

pytest.importorskip("transformers")


def write(world: ec.World, run: str, text: str) -> None:
    from echelon.integrations.transformers.trainer_checkpoint import new_folder

    with new_folder(Path(run), 3, world.group) as folder:
        assert not list(Path(run).glob("checkpoint-*/new"))
        (folder / f"{world.rank}").write_text(text)
        if text == "fails":
            raise OSError("the disk is full")


def test_a_folder_is_visible_when_all_ranks_have_written(tmp_path: Path) -> None:
    (tmp_path / ".checkpoint-2").mkdir()  # of a job that was killed
    for text in ("a", "b"):  # the second replaces the first
        ec.run(write, 2, args=(str(tmp_path), text))
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
        written = {path.name: path.read_text() for path in (tmp_path / "checkpoint-3").iterdir()}
        assert written == {"0": text, "1": text}


def test_a_failed_write_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    ec.run(write, 2, args=(str(tmp_path), "a"))
    with pytest.raises(OSError, match="the disk is full"):
        ec.run(write, 2, args=(str(tmp_path), "fails"))
    assert (tmp_path / "checkpoint-3" / "0").read_text() == "a"


def test_a_checkpoint_without_the_state_of_a_training_is_named(tmp_path: Path) -> None:
    from echelon.integrations.transformers.trainer_checkpoint import state_folder

    with pytest.raises(ec.CheckpointNotFound, match="save_only_model=True"):
        state_folder(tmp_path)
