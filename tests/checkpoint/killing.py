"""Saves in which a rank is killed, and what must be true of the folder afterwards."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.comm.world import World
from echelon.errors import CheckpointNotFound, RankFailed
from tests.checkpoint.disks import Call, Disk, KillAt
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.whole import State, check_equal, whole_state

__all__ = ["NEW", "OLD", "Scene", "kill_and_check"]

OLD, NEW, NEXT = 1, 2, 3  # the steps before, in and after the save


def save_step(world: World, layout: str, folder: Path, step: int, call: str = "save") -> State:
    """Train as many steps, and save; the state."""
    trainee = LAYOUTS[layout].trainee(world)
    for i in range(step):
        trainee.train(i)
    saving = getattr(ec, call)
    saving(folder, step=step, keep=1, model=trainee.model, optimizer=trainee.optimizer)
    return whole_state(trainee)


def save_and_die(
    world: World, layout: str, folder: Path, call: str, rank: int, strike: KillAt
) -> None:
    if world.rank == rank:
        Disk(strike).__enter__()  # as long as the process lives
    save_step(world, layout, folder, NEW, call)


def load_alone(world: World, folder: Path, step: int | None) -> tuple[int, State]:
    trainee = LAYOUTS["plain"].trainee(world, seed=1)
    loaded = ec.load(folder, step=step, model=trainee.model, optimizer=trainee.optimizer)
    return loaded.step, whole_state(trainee)


@dataclass(frozen=True)
class Scene:
    """What two ranks do when one of them is killed.

    Attributes:
        layout: how they share the model.
        call: ``"save"`` or ``"async_save"``.
        later: whether the folder has a step already, which this save removes.
    """

    layout: str = "ddp2"
    call: str = "save"
    later: bool = False

    def prepare(self, folder: Path) -> None:
        """Make the folder as the save finds it."""
        if self.later:
            shutil.copytree(template(self.layout), folder)

    def calls(self, folder: Path) -> list[Call]:
        """Those of a save that nobody disturbs."""
        self.prepare(folder)
        with Disk() as disk:
            ec.run(save_step, 2, args=(self.layout, folder, NEW, self.call))
        return disk.calls


@cache
def template(layout: str) -> Path:
    """A folder with the old step; pytest removes it with the others of its session."""
    folder: Path = _made[0] / layout
    ec.run(save_step, 2, args=(layout, folder, OLD))
    return folder


@cache
def states(layout: str) -> dict[int, State]:
    """What the steps must hold, from saves that were not disturbed."""
    folder = _made[0] / f"{layout}-whole"
    return {step: ec.run(save_step, 2, args=(layout, folder, step))[0] for step in (OLD, NEW, NEXT)}


_made: list[Path] = []


@pytest.fixture(scope="module", autouse=True)
def templates(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where what all tests of a module use is kept; modules import it."""
    _made[:] = [tmp_path_factory.mktemp("templates")]
    template.cache_clear()
    states.cache_clear()


def kill_and_check(scene: Scene, rank: int, strike: KillAt, folder: Path) -> list[int]:
    """Kill a rank in a save and check all that is promised; the steps that are left."""
    scene.prepare(folder)
    args = (scene.layout, folder, scene.call, rank, strike)
    with pytest.raises(RankFailed, match=f"rank {rank} was killed by SIGKILL"):
        ec.run(save_and_die, 2, "processes", args=args, timeout=60.0)
    left = ec.steps(folder)
    expected = states(scene.layout)
    for step in left:  # whatever is there is whole
        found, state = ec.run(load_alone, 1, args=(folder, step))[0]
        assert found == step
        check_equal(state, expected[step])
    if left:
        assert ec.run(load_alone, 1, args=(folder, None))[0][0] == left[-1]
    else:
        assert not scene.later
        with pytest.raises(CheckpointNotFound):
            ec.run(load_alone, 1, args=(folder, None))
    ec.run(save_step, 1, args=("plain", folder, NEXT))
    assert {path.name for path in folder.iterdir()} == {".lock", "step-000000003"}
    return left
