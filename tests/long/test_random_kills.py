"""A hundred kills at random, half of them aimed at saves: the job ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.comm.world import World
from echelon.errors import RankFailed
from tests.checkpoint.killing import load_alone
from tests.checkpoint.layouts import LAYOUTS
from tests.checkpoint.whole import State, check_equal, whole_state

NUM_STEPS, EVERY = 60, 3
PARTS, KILLS = 10, 10  # in each part
LEAST_IN_SAVES = 3  # of each part, which goes on until it has them
LAYOUTS_OF_PARTS = ("ddp2", "fsdp2", "pp2")


def job(world: World, layout: str, folder: Path) -> State:
    """Train from the newest step to the end; save now and then, in both ways in turn."""
    trainee = LAYOUTS[layout].trainee(world)
    given = {"model": trainee.model, "optimizer": trainee.optimizer}
    start = ec.load(folder, **given).step if ec.steps(folder) else 0
    world.group.barrier()
    (folder.parent / f"pid-{world.rank}").write_text(str(os.getpid()))
    for step in range(start, NUM_STEPS):
        trainee.train(step)
        if (step + 1) % EVERY == 0:
            call = ec.save if (step + 1) % (2 * EVERY) else ec.async_save
            call(folder, step=step + 1, keep=3, **given)
    return whole_state(trainee)


def straight(world: World, layout: str) -> dict[int, State]:
    """The state after each number of steps, of a job that nobody disturbs."""
    trainee = LAYOUTS[layout].trainee(world)
    found = {}
    for step in range(NUM_STEPS):
        trainee.train(step)
        if (step + 1) % EVERY == 0:
            found[step + 1] = {
                key: {name: one.clone() for name, one in part.items()} if key == "model" else part
                for key, part in whole_state(trainee).items()
            }
    return found


class Killer(threading.Thread):
    """Kills a rank of the next job: at a random time, or while a save is under way.

    To aim at one it needs to know how long they last, which differs with the disk: the save before.
    """

    def __init__(self, folder: Path, draw: random.Random, aims: bool) -> None:
        super().__init__(name="killer")
        self.folder, self.draw, self.aims = folder, draw, aims
        self.over = threading.Event()  # the job has ended
        for rank in (0, 1):
            self._file(rank).unlink(missing_ok=True)

    def _file(self, rank: int) -> Path:
        return self.folder.parent / f"pid-{rank}"

    def _await(self, look: Callable[[], Any]) -> Any:
        """What ``look`` gives as soon as it is something, or when the job has ended."""
        while not (found := look()) and not self.over.is_set():
            time.sleep(0.0002)
        return found

    def run(self) -> None:
        rank, wait_s = self.draw.randrange(2), self.draw.random()
        while not all(self._file(r).exists() and self._file(r).read_text() for r in (0, 1)):
            if self.over.wait(0.001):
                return
        # Another process that came to have the same number must not be killed.
        try:
            process = os.pidfd_open(int(self._file(rank).read_text()))
        except ProcessLookupError:
            return  # it has ended
        try:
            if self.aims:
                seen = saves(self.folder)  # left by the one before
                seen |= self._await(lambda: saves(self.folder) - seen)
                begun_s = time.monotonic()
                self._await(lambda: not saves(self.folder) & seen)
                lasted_s = time.monotonic() - begun_s
                self._await(lambda: saves(self.folder) - seen)
                self.over.wait(wait_s * lasted_s)
            else:
                self.over.wait(wait_s * 0.5)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)


def saves(folder: Path) -> set[str]:
    """Folders of saves that are no steps yet."""
    return {name for name in under_way(folder) if name.startswith(".saving-")}


def under_way(folder: Path) -> set[str]:
    """Folders of saves and of what they remove."""
    if not folder.exists():
        return set()
    names = {entry.name for entry in os.scandir(folder)}
    return {name for name in names if name.startswith((".saving-", ".removing-"))}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_job_whose_ranks_are_killed_ends_with_the_same_bits(part: int, tmp_path: Path) -> None:
    draw = random.Random(part)
    layout = LAYOUTS_OF_PARTS[part % len(LAYOUTS_OF_PARTS)]
    expected = ec.run(straight, 2, args=(layout,))[0]
    kills = in_saves = jobs = 0
    while kills < KILLS or in_saves < LEAST_IN_SAVES:
        jobs += 1
        folder = tmp_path / f"job-{jobs}" / "run"
        folder.parent.mkdir()
        while True:
            killer = Killer(folder, draw, aims=kills % 2 == 0)
            killer.start()
            try:
                states = ec.run(job, 2, "processes", args=(layout, folder), timeout=60.0)
            except RankFailed as error:
                if "was killed by SIGKILL" not in str(error):
                    raise
                kills += 1
                in_saves += bool(under_way(folder))
            else:
                break
            finally:
                killer.over.set()
                killer.join()
            if ec.steps(folder):
                step, state = ec.run(load_alone, 1, args=(folder, None))[0]
                check_equal(state, expected[step])
        for state in states:
            check_equal(state, expected[NUM_STEPS])
        assert not under_way(folder)
    print(f"{kills} kills, {in_saves} of them in a save")
