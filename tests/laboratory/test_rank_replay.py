"""On a rank, a replay gives back batches, states and random streams, and compares notes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import BlackboxCorrupt, CheckpointMismatch, ReplayMismatch
from echelon.laboratory.rank_replay import are_same_bits
from echelon.laboratory.step_log import StepLog


def draws() -> list[Any]:
    return [torch.rand(2).tolist(), random.random(), np.random.rand()]


def draw(world: ec.World, folder: Path, seen: list[Any]) -> None:
    random.seed(3)
    np.random.seed(4)
    torch.manual_seed(5)

    def loader() -> Iterator[int]:
        for i in range(6):
            draws()
            yield i

    box = ec.Blackbox(folder, every=2)
    for step, i in box.steps(loader()):
        seen.append((step, i, draws(), world.step))
        world.step = 10 * step


def test_random_streams_and_the_count_of_steps_are_those_of_the_run(tmp_path: Path) -> None:
    before: list[Any] = []
    after: list[Any] = []
    ec.run(draw, 1, args=(tmp_path, before))
    replay = ec.replay(tmp_path, draw, step=6, args=(tmp_path, after))
    assert (replay.first_step, after) == (5, before[4:])


@dataclass
class Pair:
    x: torch.Tensor
    y: int


def test_batches_of_a_class_are_built_again(tmp_path: Path) -> None:
    seen: list[Any] = []

    def main(world: ec.World) -> None:
        box = ec.Blackbox(tmp_path)
        for _, batch in box.steps([Pair(torch.ones(2), 3)], build=Pair):
            seen.append((type(batch), batch.x.tolist(), batch.y))

    ec.run(main, 1)
    ec.replay(tmp_path, main)
    assert seen == [(Pair, [1.0, 1.0], 3)] * 2


def note(world: ec.World, folder: Path, more: float) -> None:
    box = ec.Blackbox(folder)
    for step, x in box.steps([0.5, 1.5]):
        box.note(loss=torch.tensor(x + more), first=step)
        box.note(second=x)


def test_numbers_that_are_others_are_named(tmp_path: Path) -> None:
    ec.run(note, 2, args=(tmp_path, 0.0))
    same = ec.replay(tmp_path, note, args=(tmp_path, 0.0))
    assert (same.same, same.num_compared, same.differences) == (True, 12, [])
    other = ec.replay(tmp_path, note, args=(tmp_path, 1.0), step=1)
    assert not other.same
    assert [str(difference) for difference in other.differences] == [
        f"step 1, rank {rank}: loss was 0.5 in the run and is 1.5 in the replay" for rank in (0, 1)
    ]


def test_another_batch_is_not_compared(tmp_path: Path) -> None:
    ec.run(note, 1, args=(tmp_path, 0.0))
    replay = ec.replay(tmp_path, note, args=(tmp_path, 0.0), batch_of=1)
    assert (replay.num_compared, replay.differences) == (3, [])  # of step 1


def test_another_model_and_another_number_of_ranks_are_refused(tmp_path: Path) -> None:
    def main(world: ec.World, width: int, alone: bool) -> None:
        model = nn.Linear(width, 1)
        group = world.mesh(pp=2, dp=1)["dp"] if alone else None
        box = ec.Blackbox(tmp_path, model=model, group=group)
        for _ in box.steps([1]):
            pass

    ec.run(main, 2, args=(3, False))
    with pytest.raises(CheckpointMismatch, match="the checkpoint does not fit"):
        ec.replay(tmp_path, main, args=(4, False))
    with pytest.raises(ReplayMismatch, match="number of ranks: 2 in the run, 1 here"):
        ec.replay(tmp_path, main, args=(3, True))


def test_bits_are_compared_and_not_values() -> None:
    nan = float("nan")
    assert are_same_bits(nan, nan)
    assert are_same_bits(torch.tensor([nan]), torch.tensor([nan]))
    assert are_same_bits(3, 3)
    assert not are_same_bits(0.0, -0.0)
    assert not are_same_bits(torch.tensor(0.0), torch.tensor(-0.0))
    assert not are_same_bits(1, 1.0)
    assert not are_same_bits(torch.ones(1), torch.ones(1, dtype=torch.float64))
    assert not are_same_bits(None, 1.0)


def test_damaged_states_and_steps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ec.run(note, 1, args=(tmp_path, 0.0))
    whole = StepLog.begin
    for damage in ({"random": {}}, {"random": []}, {"world_step": "1"}):
        monkeypatch.setattr(StepLog, "begin", lambda log, step: whole(log, step) | damage)  # noqa: B023
        with pytest.raises(
            BlackboxCorrupt, match=r"has no states of random|has a step that is none"
        ):
            ec.replay(tmp_path, note, args=(tmp_path, 0.0))
