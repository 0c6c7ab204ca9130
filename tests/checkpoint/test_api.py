"""Calls that cannot be carried out are refused before anything is written or changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, CheckpointError, CheckpointNotFound

SAVES = {"save": ec.save, "async_save": ec.async_save}


class Odd:
    """Something that a checkpoint cannot hold."""


def adam() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


WRONG = [
    *[("directory", value) for value in (None, 3, "", b"runs", "a\0b", ["a"])],
    *[("step", value) for value in (None, -1, 1.5, "3", True, 10**9, torch.ones(2))],
    *[("keep", value) for value in (0, -1, 1.5, "all", True)],
    *[("rng", value) for value in (None, 1, "yes")],
    *[("model", value) for value in (3, nn.Linear, [nn.Linear(2, 2)])],
    *[("optimizer", value) for value in (3, nn.Linear(2, 2), torch.optim.SGD)],
    *[("group", value) for value in (3, "world", [0, 1])],
]


@pytest.mark.parametrize("call", SAVES)
@pytest.mark.parametrize(("name", "value"), WRONG, ids=lambda value: f"{value!r:.20}")
def test_a_wrong_argument_of_a_save_is_named(
    call: str, name: str, value: Any, tmp_path: Path
) -> None:
    arguments = {"directory": tmp_path / "run", "step": 1, "model": nn.Linear(2, 2), name: value}
    with pytest.raises(ArgumentError, match=f"^{name} is "):
        SAVES[call](**arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"a/b": 1}, "'a/b' cannot be the name of something in a checkpoint"),
        ({"own": 1}, "'own' cannot be the name"),
        ({"": 1}, "'' cannot be the name"),
        ({"x\n": torch.ones(2)}, r"'x\\n"),
        ({"epoch": Odd()}, r"epoch is a .*Odd, which cannot be saved in a checkpoint"),
        ({"parts": [1, {"deep": Odd()}]}, r"parts\[1\]\.deep is a .*Odd"),
        ({"optimizer": adam()}, "group 0 of 'optimizer' has a parameter of shape"),
    ],
)
def test_what_cannot_be_saved_is_named(
    given: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    for saving in SAVES.values():
        with pytest.raises(ArgumentError, match=sentence):
            saved = saving(tmp_path, step=1, model=nn.Linear(2, 2), **given)
            saved.wait()
        assert ec.steps(tmp_path) == []
        assert {path.name for path in tmp_path.iterdir()} <= {".lock"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("directory", value) for value in (None, "", b"runs", "a\0b")],
        *[("step", value) for value in (-1, 1.5, "3", True, 10**9)],
        *[(name, value) for name in ("strict", "fallback", "rng") for value in (None, 1, "no")],
        *[("model", value) for value in (3, nn.Linear)],
        *[("optimizer", value) for value in (3, nn.Linear(2, 2))],
        ("group", "world"),
        ("epoch", 3),
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_a_wrong_argument_of_a_load_is_named(name: str, value: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    before = model.weight.detach().clone()
    ec.save(tmp_path, step=1, model=nn.Linear(2, 2), epoch=3)
    arguments = {"directory": tmp_path, "model": model, name: value}
    with pytest.raises(ArgumentError, match=f"^{name} is "):
        ec.load(**arguments)
    assert torch.equal(model.weight, before)


def test_what_is_not_there_is_said_with_what_is(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    assert ec.steps(tmp_path / "none") == []
    with pytest.raises(CheckpointNotFound, match="no step was committed here"):
        ec.load(tmp_path / "none", model=model)
    for step in (3, 20):
        ec.save(tmp_path, step=step, model=model)
    (tmp_path / "step-000000005").symlink_to(tmp_path / "step-000000003")
    (tmp_path / "step-000000030").write_text("no folder")
    for step in (5, 19, 30):
        with pytest.raises(CheckpointNotFound, match=f"step {step} is not there; committed: 3, 20"):
            ec.load(tmp_path, model=model, step=step, fallback=True)
    assert ec.load(tmp_path, model=model).step == 20
    assert ec.load(tmp_path / "step-000000003", model=model).step == 3
    file = tmp_path / "file"
    file.touch()
    for act in (lambda: ec.steps(file), lambda: ec.load(file), lambda: ec.save(file, step=1)):
        with pytest.raises(CheckpointError, match=f"^{file}: .*errno"):
            act()


@pytest.mark.parametrize("call", [ec.save, ec.async_save])
def test_a_name_that_no_file_can_have_is_refused(call: Any) -> None:
    with pytest.raises(ArgumentError, match="give the path of a folder"):
        call("/tmp/\ud800", step=1)


def test_without_a_current_folder_a_relative_one_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(CheckpointError, match="errno 2"):
        ec.save("run", step=1, value=1)


def test_a_class_is_no_object_with_a_state(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="x"):
        ec.save(tmp_path, step=1, x=nn.Linear)


def test_a_run_may_be_named_like_a_step(tmp_path: Path) -> None:
    ec.save(tmp_path / "step-000000005", step=1, value=1)
    assert ec.load(tmp_path / "step-000000005").step == 1


def removes(world: World, folder: Path) -> int:
    """Rank 0 saves and removes what came before, while rank 1 loads."""
    if world.rank == 0:
        for step in range(2, 60):
            ec.save(folder, step=step, keep=1, value=step)
        return 0
    return sum(ec.load(folder).step > 0 for _ in range(60))


@pytest.mark.slow
def test_a_load_looks_again_when_its_step_goes_away(tmp_path: Path) -> None:
    ec.save(tmp_path, step=1, value=1)
    assert ec.run(removes, 2, "processes", args=(tmp_path,)) == [0, 60]
