"""Calls that cannot be carried out: refused on all ranks, before anything is written or changed."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from echelon.errors import ArgumentError, CheckpointError, CheckpointNotFound, CollectiveMismatch
from tests.checkpoint.disks import Act, Call, Disk
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.whole import check_equal, whole_state

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


# Steps that are there --------------------------------------------------------------------------


def test_a_step_that_is_whole_is_never_replaced(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    kept = ec.save(tmp_path, step=1, model=model)
    files = {path.name: path.read_bytes() for path in kept.iterdir()}
    with torch.no_grad():
        model.weight.zero_()
    for saving in SAVES.values():
        with pytest.raises(CheckpointError, match="was saved already, and what is committed is"):
            saving(tmp_path, step=1, model=model)
    assert {path.name: path.read_bytes() for path in kept.iterdir()} == files


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


HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); input()"
)


def test_a_save_of_another_process_is_waited_for_by_nobody_and_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ec.save(tmp_path, step=1, model=model)
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for saving in SAVES.values():
            with pytest.raises(CheckpointError, match="another save into this folder is under way"):
                saving(tmp_path, step=2, model=model)
        other.send_signal(signal.SIGKILL)
    ec.save(tmp_path, step=2, model=model)
    assert ec.steps(tmp_path) == [1, 2]


# Ranks that differ -----------------------------------------------------------------------------


def differ(world: World, folder: Path) -> list[str]:
    """Each time rank 1 asks for something else; the world goes on."""
    trainee = LAYOUTS["ddp2"].trainee(world)
    trainee.train(0)
    own = {"directory": folder, "step": 7, "keep": 3, "rng": True}
    own |= {"model": trainee.model, "optimizer": trainee.optimizer}
    texts = []

    def ask(call: Callable[..., object], one: dict[str, Any], other: dict[str, Any]) -> None:
        given = {key: value for key, value in (other if world.rank else one).items() if value}
        with pytest.raises(ArgumentError) as info:
            call(**given)
        texts.append(str(info.value))
        world.group.barrier()

    for saving in SAVES.values():
        for name, value in [("step", 8), ("directory", folder / "b"), ("keep", 2), ("epoch", 4)]:
            ask(saving, own, {**own, name: value})
        ask(saving, own, {**own, "optimizer": None})
    ec.save(**own)
    loads = {"directory": folder, "model": trainee.model, "strict": True}
    for name, value in [("directory", folder / "b"), ("step", 7), ("fallback", True)]:
        ask(ec.load, loads, {**loads, name: value})
    ask(ec.load, loads, {**loads, "optimizer": trainee.optimizer})
    with pytest.raises(
        CollectiveMismatch, match=r"'.*a request to save, which(.|\n)*'.*a request to load, which"
    ):
        ec.load(**loads) if world.rank else ec.save(**{**own, "step": 9})
    ec.save(**{**own, "step": 8})
    assert ec.steps(folder) == [7, 8]
    return texts


def test_ranks_that_ask_for_different_things_are_all_told_who_asks_for_what(tmp_path: Path) -> None:
    first, second = ec.run(differ, 2, args=(tmp_path,))
    assert first == second
    of_saves = ["step", "directory", "keep", "names", "names"]
    of_loads = ["directory", "step", "fallback", "names"]
    for text, key in zip(first, [*of_saves, *of_saves, *of_loads], strict=True):
        assert text.startswith("the ranks differ in a request to ")
        assert f"; {key}:\n  rank 0: " in text
        assert "\n  rank 1: " in text


class Fails:
    """Raises where one rank gives its state or takes it back."""

    def __init__(self, gives: bool, takes: bool) -> None:
        self.gives, self.takes = gives, takes

    def state_dict(self) -> dict[str, Any]:
        if self.gives:
            raise KeyError("no state")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.takes:
            raise RuntimeError("no such state")


def fail_on_one(world: World, folder: Path) -> list[str]:
    trainee = LAYOUTS["fsdp2"].trainee(world)
    trainee.train(0)
    own = {"model": trainee.model, "optimizer": trainee.optimizer}
    liar, texts = world.rank == 1, []
    for saving in SAVES.values():
        for given in ({"epoch": Odd() if liar else 1}, {"sampler": Fails(liar, False)}):
            with pytest.raises((ArgumentError, CheckpointError, KeyError)) as info:
                saving(folder, step=1, **own, **given)
            texts.append(f"{type(info.value).__name__}: {info.value}")
    ec.save(folder, step=1, **own, sampler=Fails(False, False))
    other = LAYOUTS["fsdp2"].trainee(world, seed=1)
    other.train(1)
    before = copy.deepcopy(whole_state(other))
    with pytest.raises(CheckpointError) as info:
        given = {"model": other.model, "optimizer": other.optimizer}
        ec.load(folder, **given, sampler=Fails(False, liar))
    texts.append(f"{type(info.value).__name__}: {info.value}")
    check_equal(whole_state(other), before)
    other.train(2)
    return texts


def test_what_fails_on_one_rank_is_an_error_on_all_that_names_it(tmp_path: Path) -> None:
    first, second = ec.run(fail_on_one, 2, args=(tmp_path,))
    odd = "ArgumentError: rank 1: epoch is a tests.checkpoint.test_refusals.Odd, which cannot be"
    for i in (0, 2):
        assert first[i] == second[i]
        assert first[i].startswith(odd)
        assert first[i + 1] == f"CheckpointError: rank 1: {tmp_path}: raised KeyError: 'no state'"
        assert second[i + 1] == "KeyError: 'no state'"
    refused = "sampler does not take its state: RuntimeError: no such state"
    assert first[4] == second[4]
    assert first[4] == f"CheckpointError: rank 1: {tmp_path}/step-000000001: {refused}"


# Ranks that do not say that they are several -----------------------------------------------------


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
