"""Law *Resume*: some steps, a new process, and as many more are as if nothing had been between.

These are four steps and four; tests/long has ten and ten.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import echelon as ec
from echelon.comm.world import World
from tests.checkpoint.layouts import LAYOUTS, Trainee
from tests.checkpoint.whole import State, check_equal, whole_state
from tests.worlds import run_world

HALF = 4
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
ON_TWO = ["ddp2", "fsdp2", "fsdp2-flat", "fsdp2-whole", "pp2", "pp2-zbv"]
ON_MORE = ["plain", "ddp3", "fsdp3", "fsdp3-rows", "hybrid4", "pp3", "pp2-dp2", "pp2-shard2"]
OTHERS = [("ddp2", "fsdp3"), ("fsdp3", "ddp2"), ("pp2", "fsdp4"), ("hybrid4", "pp3")]
OTHERS += [("pp2-shard2", "plain"), ("plain", "pp2-dp2"), ("fsdp4", "fsdp2"), ("ddp3", "pp2-zbv")]


def optimizer_of(name: str) -> str:
    return "adamw-one" if name == "fsdp2-flat" else "adamw"


def draws(world: World) -> list[Any]:
    """The next numbers of this rank; simulated ranks share generators other than torch's."""
    if world.backend == "threads":
        return [torch.rand(1000)]
    return [torch.rand(1000), [random.random() for _ in range(1000)], np.random.rand(1000).tolist()]


def scheduler_of(trainee: Trainee) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(trainee.optimizer, [2, 5, 12, 15], gamma=0.7)


def go_on(trainee: Trainee, scheduler: Any, first: int, end: int) -> list[float]:
    losses = []
    for step in range(first, end):
        torch.rand(3)  # as dropout would draw
        random.random()
        np.random.rand()
        losses.append(trainee.train(step))
        scheduler.step()
    return losses


def straight(world: World, names: list[str], half: int = HALF) -> dict[str, Any]:
    found = {}
    for name in names:
        seed(world)
        trainee = LAYOUTS[name].trainee(world, optimizer_of(name))
        losses = go_on(trainee, scheduler_of(trainee), 0, 2 * half)
        found[name] = [losses[half:], draws(world), whole_state(trainee)]
    return found


def first_half(world: World, names: list[str], folder: Path, half: int = HALF) -> None:
    for name in names:
        seed(world)
        trainee = LAYOUTS[name].trainee(world, optimizer_of(name))
        scheduler = scheduler_of(trainee)
        go_on(trainee, scheduler, 0, half)
        state = {"model": trainee.model, "optimizer": trainee.optimizer, "scheduler": scheduler}
        ec.save(folder / name, step=half, **alone(world, name), **state)


def second_half(
    world: World, pairs: list[tuple[str, str]], folder: Path, half: int = HALF
) -> dict[str, Any]:
    """Go on from what the first of each pair has saved, in the layout of the second."""
    found = {}
    for source, target in pairs:
        trainee = LAYOUTS[target].trainee(world, optimizer_of(target), seed=1)
        scheduler = scheduler_of(trainee)
        state = {"model": trainee.model, "optimizer": trainee.optimizer, "scheduler": scheduler}
        loaded = ec.load(folder / source, **alone(world, target), **state)
        assert loaded.step == half
        losses = go_on(trainee, scheduler, half, 2 * half)
        found[target] = [losses, draws(world), whole_state(trainee)]
    return found


def seed(world: World) -> None:
    torch.manual_seed(7 + world.rank)
    if world.backend != "threads":
        random.seed(world.rank)
        np.random.seed(world.rank)


def alone(world: World, name: str) -> dict[str, Any]:
    return {"group": world.group} if LAYOUTS[name].ranks == 1 else {}


def check_the_same(kind: str, ranks: int, names: list[str], folder: Path, half: int = HALF) -> None:
    """Refuse any other bit after a stop, on as many ranks and in the same layout."""
    expected = run_world(kind, straight, ranks, args=(names, half))
    run_world(kind, first_half, ranks, args=(names, folder, half))
    pairs = [(name, name) for name in names]
    check_equal(run_world(kind, second_half, ranks, args=(pairs, folder, half)), expected)


def check_close(source: str, target: str, folder: Path, half: int = HALF) -> None:
    """Refuse more than the roundings of float64 after a stop, in another layout."""
    ranks = LAYOUTS[source].ranks
    ec.run(first_half, ranks, args=([source], folder, half))
    kept = ec.run(straight, ranks, args=([source], half))[0][source][2]
    pairs = [(source, target)]
    for one in ec.run(second_half, LAYOUTS[target].ranks, args=(pairs, folder, half)):
        state: State = one[target][2]
        for key, value in kept["model"].items():
            torch.testing.assert_close(state["model"][key], value, **CLOSE, msg=key)
        for name, own in kept["optimizer"]["state"].items():
            for key, value in own.items():
                torch.testing.assert_close(
                    state["optimizer"]["state"][name][key], value, **CLOSE, msg=f"{name} {key}"
                )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "processes", "gloo"])
def test_all_steps_are_one_half_and_the_other_with_the_same_bits(kind: str, tmp_path: Path) -> None:
    check_the_same(kind, 2, ON_TWO, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_MORE)
def test_they_are_the_same_bits_on_any_number_of_simulated_ranks(name: str, tmp_path: Path) -> None:
    check_the_same("threads", LAYOUTS[name].ranks, [name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "target"), OTHERS)
def test_another_layout_goes_on_as_the_one_that_has_saved(
    source: str, target: str, tmp_path: Path
) -> None:
    check_close(source, target, tmp_path)
