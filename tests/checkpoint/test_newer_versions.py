"""Steps that a newer version has written: never taken for damaged ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app
from echelon.comm.world import World
from echelon.errors import CheckpointCorrupt, CheckpointTooNew
from tests.checkpoint.manifests import sealed

SAVES = {"save": ec.save, "async_save": ec.async_save}


def make_newer(step: Path) -> dict[str, bytes]:
    """Let a step be of a schema that is not known here; its files."""
    found = {"schema": 4, "parts": {"manifest-0.bin": [1, 2, 3]}}
    content = json.dumps(found, separators=(",", ":")).encode()[1:]
    (step / "manifest.json").write_bytes(sealed(content))
    return files_of(step)


def files_of(step: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in step.iterdir()}


def damage(step: Path) -> None:
    (step / "rank-00000.safetensors").unlink()


@pytest.mark.parametrize("call", SAVES)
def test_a_save_does_not_replace_what_a_newer_version_has_saved(call: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    step = ec.save(tmp_path, step=1, model=model)
    files = make_newer(step)
    with pytest.raises(CheckpointTooNew, match=r"neither loaded nor replaced: upgrade echelon"):
        SAVES[call](tmp_path, step=1, model=model)
    assert files_of(step) == files
    assert {path.name for path in tmp_path.iterdir()} == {".lock", step.name}


def load_all(world: World, folder: Path) -> list[str]:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    texts = []
    for options in ({}, {"fallback": True}, {"step": 2, "fallback": True}):
        with pytest.raises(CheckpointTooNew) as info:
            ec.load(folder, model=model, group=world.group, **options)
        texts.append(str(info.value))
        assert (info.value.schema, info.value.known) == (4, 3)
    assert torch.equal(model.weight, before)
    assert ec.load(folder, model=model, step=1, group=world.group).step == 1
    return texts


def test_a_newer_step_is_an_error_on_all_ranks_and_no_older_one_is_loaded_for_it(
    tmp_path: Path,
) -> None:
    for step in (1, 2):
        ec.save(tmp_path, step=step, model=nn.Linear(2, 2))
    make_newer(tmp_path / "step-000000002")
    first, second = ec.run(load_all, 2, args=(tmp_path,))
    assert first == second
    assert all("was written by a newer version of echelon" in text for text in first)


def test_a_damaged_step_is_passed_over_until_a_newer_one_is_found(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2, 3):
        ec.save(tmp_path, step=step, model=model)
    make_newer(tmp_path / "step-000000002")
    damage(tmp_path / "step-000000003")
    with (
        pytest.warns(UserWarning, match="a damaged checkpoint was passed over"),
        pytest.raises(CheckpointTooNew),
    ):
        ec.load(tmp_path, model=model, fallback=True)
    with pytest.raises(CheckpointCorrupt):
        ec.load(tmp_path, model=model)


def test_keep_neither_counts_nor_removes_what_a_newer_version_has_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in (1, 2, 3, 4):
        ec.save(tmp_path, step=step, model=model)
    newer = {name: make_newer(tmp_path / name) for name in ("step-000000002", "step-000000004")}
    ec.save(tmp_path, step=5, model=model, keep=2)
    assert ec.steps(tmp_path) == [2, 3, 4, 5]
    ec.save(tmp_path, step=6, model=model, keep=1)
    assert ec.steps(tmp_path) == [2, 4, 6]
    assert {name: files_of(tmp_path / name) for name in newer} == newer


def test_ls_and_verify_say_that_a_step_is_newer_and_not_damaged(tmp_path: Path) -> None:
    for step in (1, 2):
        ec.save(tmp_path, step=step, model=nn.Linear(2, 2), rng=False)
    make_newer(tmp_path / "step-000000001")
    for command in ("ls", "verify"):
        result = CliRunner().invoke(app, ["checkpoint", command, str(tmp_path)])
        assert result.exit_code == 1
        text = " ".join(result.output.replace("|", " ").split())  # a table folds its cells
        assert "not known here" in text
        assert "written by a newer version of echelon, in schema 4" in text
        assert "damaged" not in text
