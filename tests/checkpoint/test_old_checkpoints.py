"""Checkpoints and state dicts that commit 3e1ed13 has written: they load, and are written, alike.

``write_fixtures`` has written what lies in ``fixtures``, and says what is in it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import echelon as ec
from tests.checkpoint.whole import check_equal
from tests.checkpoint.write_fixtures import FIXTURES, LAYOUTS, STEP, Job, Layout, read_state

OTHERS = ["plain", "ddp2", "full3", "hybrid4", "pp2", "pp2-zbv-sgd", "pp2-shard2", "no-shard2"]
PAIRS = sorted(
    {(name, OTHERS[(i * 3 + k) % len(OTHERS)]) for i, name in enumerate(LAYOUTS) for k in range(3)}
)
STEP_FOLDER = f"step-{STEP:09}"


def as_loaded_by(target: str, source: str) -> Layout:
    """A layout, with the optimizer and the dtype of a checkpoint."""
    saved = LAYOUTS[source]
    return replace(LAYOUTS[target], optimizer=saved.optimizer, dtype=saved.dtype, rng=saved.rng)


def check_alike(found: Any, expected: Any, where: str = "") -> None:
    """Refuse anything but the same bits, types and order."""
    if isinstance(expected, Tensor):
        check_equal(found, expected, where)
        return
    assert isinstance(found, type(expected)), where
    if isinstance(expected, dict):
        if where.endswith(".state"):  # the version before had a set for its order in pipelines
            assert found.keys() == expected.keys(), where
        else:
            assert list(found) == list(expected), where
        for key in expected:
            check_alike(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), where
        for i, item in enumerate(expected):
            check_alike(found[i], item, f"{where}[{i}]")
    else:
        assert found == expected or found != found, where


def load(world: ec.World, layout: Layout, folder: Path) -> dict[str, Any]:
    job = Job.new(layout, world, seed=1)
    loaded = job.load(folder)
    return {
        "step": loaded.step,
        "values": dict(loaded.values),
        "whole": job.whole(),
        "rest": job.rest(),
        "own": job.own(),
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_gives_its_ranks_what_it_gave_them_before(name: str) -> None:
    layout = LAYOUTS[name]
    folder = FIXTURES / name
    whole, ranks = read_state(folder / "whole"), read_state(folder / "ranks")
    found = ec.run(load, layout.parsed.num_ranks, args=(layout, folder))
    for rank, (state, expected) in enumerate(zip(found, ranks, strict=True)):
        assert state["step"] == STEP
        assert state["values"].keys() == {"epoch", "notes", "draws"}
        assert state["values"]["epoch"] == 3
        notes = state["values"]["notes"]
        assert (notes["text"], notes["pair"]) == ("ü", (1, 2.5))
        assert notes["nan"] != notes["nan"]
        assert torch.equal(notes["table"], torch.eye(2))
        assert state["values"]["draws"][0] == rank
        assert state["values"]["draws"][1].tolist() == [rank, rank]
        check_alike(state["whole"], whole)
        check_alike(state["rest"], expected["rest"])
        check_alike(state["own"], expected["own"])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_a_checkpoint_loads_in_another_layout(source: str, target: str) -> None:
    layout = as_loaded_by(target, source)
    expected = read_state(FIXTURES / source / "whole")
    for state in ec.run(load, layout.parsed.num_ranks, args=(layout, FIXTURES / source)):
        assert state["values"]["epoch"] == 3
        check_equal(state["whole"], expected)


def save_again(world: ec.World, layout: Layout, source: Path, target: Path) -> None:
    torch.set_num_threads(1)
    job = Job.new(layout, world, seed=1)
    job.load(source)
    job.save(target)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_was_loaded_is_saved_in_the_same_bytes(name: str, tmp_path: Path) -> None:
    layout, before = LAYOUTS[name], FIXTURES / name / STEP_FOLDER
    ec.run(save_again, layout.parsed.num_ranks, args=(layout, FIXTURES / name, tmp_path))
    after = tmp_path / STEP_FOLDER
    assert sorted(path.name for path in after.iterdir()) == sorted(
        path.name for path in before.iterdir()
    )
    for path in before.glob("rank-*"):
        assert (after / path.name).read_bytes() == path.read_bytes(), path.name
    old, new = (json.loads((folder / "manifest.json").read_bytes()) for folder in (before, after))
    for manifest in (old, new):
        for key in ("checksum", "versions", "threads"):
            manifest.pop(key)
    new["world"] = {key: new["world"][key] for key in old["world"]}  # information may be added
    assert json.dumps(new) == json.dumps(old)  # and in the same order


def load_state_dicts(world: ec.World, layout: Layout, source: Path) -> dict[str, Any]:
    job = Job.new(layout, world, seed=1)
    state = read_state(source / "whole")
    job.model.load_state_dict(state["model"])
    assert isinstance(job.model, ec.FSDP | ec.Pipeline)
    job.model.load_optimizer_state_dict(job.optimizer, state["optimizer"])
    return job.whole()


SHARED = [name for name in LAYOUTS if not name.startswith(("plain", "ddp"))]


@pytest.mark.parametrize("name", SHARED)
def test_state_dicts_by_name_load_and_are_the_same_again(name: str) -> None:
    layout, folder = LAYOUTS[name], FIXTURES / name
    expected = read_state(folder / "whole")
    for state in ec.run(load_state_dicts, layout.parsed.num_ranks, args=(layout, folder)):
        check_alike(state, expected)


@pytest.mark.parametrize("source", ["plain", "ddp3-sgd", "full3", "pp2"])
@pytest.mark.parametrize("target", ["full3", "rows2-sgd", "hybrid4", "pp2", "pp2-shard2"])
def test_state_dicts_by_name_load_in_another_layout(source: str, target: str) -> None:
    layout, folder = as_loaded_by(target, source), FIXTURES / source
    expected = read_state(folder / "whole")
    for state in ec.run(load_state_dicts, layout.parsed.num_ranks, args=(layout, folder)):
        check_equal(state, expected)


def load_parts(world: ec.World, name: str) -> dict[str, Any]:
    job = Job.new(LAYOUTS[name], world, seed=1)
    own = read_state(FIXTURES / name / "ranks")[world.rank]["own"]
    assert isinstance(job.model, ec.FSDP | ec.Pipeline)
    if "sharded_state_dict" in own:
        job.model.load_sharded_state_dict(own["sharded_state_dict"])
    else:
        job.model.load_state_dict(own["state_dict"])
    return {"model": job.whole()["model"], "own": job.own()}


@pytest.mark.parametrize("name", SHARED)
def test_state_dicts_of_parts_load_and_are_the_same_again(name: str) -> None:
    whole, ranks = read_state(FIXTURES / name / "whole"), read_state(FIXTURES / name / "ranks")
    found = ec.run(load_parts, LAYOUTS[name].parsed.num_ranks, args=(name,))
    for state, expected in zip(found, ranks, strict=True):
        check_alike(state["model"], whole["model"])
        check_alike(state["own"], expected["own"])
