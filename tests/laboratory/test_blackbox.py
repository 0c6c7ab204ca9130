"""What a user can give to a black box, and what is refused with a sentence."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import ArgumentError, StateError


def test_a_box_needs_a_world(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"call ec\.init\(\) before it, or use ec\.run"):
        ec.Blackbox(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"directory": 3}, "directory is 3; give a path"),
        ({"keep": 0}, "keep is 0; give a whole number >= 1"),
        ({"every": 0}, "every is 0; give a whole number >= 1"),
        ({"first_step": 0}, "first_step is 0; give a whole number >= 1"),
        ({"model": 3}, "model is 3; give a torch.nn.Module"),
        ({"optimizer": 3}, "optimizer is 3; give a torch.optim.Optimizer"),
        ({"group": 3}, "group is 3; give a Group"),
        ({"epoch": 3}, "epoch is a int, which cannot take a state back in a replay"),
        ({"rng": nn.Linear(1, 1)}, "'rng' cannot be the name of something in a checkpoint"),
    ],
)
def test_what_cannot_be_used_is_refused(
    arguments: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    def main(world: ec.World) -> None:
        ec.Blackbox(**{"directory": tmp_path, **arguments})

    with pytest.raises(ArgumentError, match=sentence.replace("(", r"\(")):
        ec.run(main, 1)


@dataclass
class Pair:
    x: int


@pytest.mark.parametrize(
    ("batch", "build", "sentence"),
    [
        (Pair(3), None, r"a batch is a Pair, .* give box\.steps\(\.\.\., build=Pair\)"),
        (OrderedDict(x=3), None, r"a batch is a OrderedDict, .*build=OrderedDict"),
        ([3], Pair, "a batch is a list, which has no fields for build"),
        ((1, open), None, r"batch\[1\] is a builtin_function_or_method, which cannot be kept by a"),
    ],
)
def test_a_batch_of_another_class_says_what_to_give(
    batch: object, build: Any, sentence: str, tmp_path: Path
) -> None:
    def main(world: ec.World) -> None:
        next(iter(ec.Blackbox(tmp_path).steps([batch], build=build)))

    with pytest.raises(ArgumentError, match=sentence):
        ec.run(main, 1)


def test_only_numbers_are_noted(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        box = ec.Blackbox(tmp_path)
        for _ in box.steps([1]):
            box.note(loss="low")

    with pytest.raises(ArgumentError, match="loss is 'low'; give a number or a tensor"):
        ec.run(main, 1)


def test_steps_are_counted_on_over_epochs_from_the_first(tmp_path: Path) -> None:
    def main(world: ec.World) -> list[tuple[int, str]]:
        box = ec.Blackbox(tmp_path, first_step=812)
        return [pair for _ in range(2) for pair in box.steps("ab")]

    assert ec.run(main, 1) == [[(812, "a"), (813, "b"), (814, "a"), (815, "b")]]


def test_batches_are_given_to_the_loop_as_they_are(tmp_path: Path) -> None:
    def main(world: ec.World) -> None:
        x = torch.ones(2)
        ((_, batch),) = ec.Blackbox(tmp_path).steps([(x, 1)])
        assert batch[0] is x

    ec.run(main, 1)


def test_in_a_replay_neither_the_loader_nor_a_file_is_touched(tmp_path: Path) -> None:
    def main(world: ec.World, folder: Path, loader: list[int] | None) -> None:
        layer = nn.Linear(1, 1)
        box = ec.Blackbox(folder, model=layer)
        batches: Any = loader
        for step, _ in box.steps(batches):
            assert box.step == step
            box.note(loss=1.0)
            kept = box.keep()
            assert (kept is None) == world.is_replay
            ec.save(tmp_path / "saved", step=step, model=layer)
            ec.async_save(tmp_path / "async", step=step, model=layer).wait()
            info = ec.observe.RunInfo(total_steps=1)
            with ec.observe.Recorder(world, tmp_path / "report", info) as recorder:
                recorder.step(1, 1.0, num_tokens=1)
        box.close()

    ec.run(main, 1, args=(tmp_path / "box", [1]))
    before = sorted(tmp_path.rglob("*"))
    replay = ec.replay(tmp_path / "box", main, args=(tmp_path / "nowhere", None))
    assert replay.same
    assert sorted(tmp_path.rglob("*")) == before
    assert {"saved", "async", "report", "box"} == {path.name for path in tmp_path.iterdir()}
