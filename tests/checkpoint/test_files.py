"""Which folders count as steps."""

from __future__ import annotations

from pathlib import Path

import pytest

import echelon as ec
from echelon.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound


def test_folders_without_a_manifest_do_not_count_among_those_that_are_kept(tmp_path: Path) -> None:
    ec.save(tmp_path, step=1, value=1)
    for step in (2, 3):
        (tmp_path / f"step-{step:09}").mkdir()
    ec.save(tmp_path, step=4, keep=2, value=4)
    assert ec.load(tmp_path, step=1).values == {"value": 1}
    ec.save(tmp_path, step=5, keep=2, value=5)
    with pytest.raises(CheckpointNotFound):
        ec.load(tmp_path, step=1)


def test_an_empty_folder_that_an_interrupted_copy_has_left_is_no_step(tmp_path: Path) -> None:
    ec.save(tmp_path, step=3, value=3)
    for step in (10, 20):
        (tmp_path / f"step-{step:09}").mkdir()
    assert ec.load(tmp_path).step == 3
    (tmp_path / "step-000000010" / "rank-00000.safetensors").write_bytes(b"")
    assert ec.steps(tmp_path) == [3, 10]
    with pytest.raises(CheckpointCorrupt):
        ec.load(tmp_path)


def test_a_link_to_nothing_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").symlink_to("scratch")
    with pytest.raises(CheckpointError, match="it is a link to 'scratch', which is not there"):
        ec.save(tmp_path / "run", step=1, value=1)
