"""Whenever a rank is killed, the last step that all ranks have begun has the bits of the run."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import echelon as ec
from echelon.errors import RankFailed
from tests.laboratory.boxed_runs import Boxed, train_ddp, train_staged_shards

TRIES = 20


def killed(world: ec.World, train: Any, boxed: Boxed, seconds: float) -> None:
    """Train until one of the ranks kills its process, some time after its first step."""

    def kill() -> None:
        while not boxed.bits(1, "run"):
            time.sleep(0.001)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    if world.rank == 1:
        threading.Thread(target=kill, daemon=True).start()
    train(world, boxed)


@pytest.mark.parametrize(("train", "ranks"), [(train_ddp, 2), (train_staged_shards, 4)])
def test_a_rank_is_killed_at_a_random_moment(train: Any, ranks: int, tmp_path: Path) -> None:
    draws = random.Random(ranks)
    for i in range(TRIES):
        boxed = Boxed(tmp_path / f"{i}" / "run", steps=100_000, every=draws.choice([1, 3, 20]))
        boxed.folder.parent.mkdir()
        with pytest.raises(RankFailed, match="SIGKILL"):
            ec.run(killed, ranks, "processes", args=(train, boxed, draws.uniform(0.0, 1.0)))
        replay = ec.replay(boxed.folder, train, args=(boxed,))
        assert (replay.errors, replay.differences) == ({}, [])
        for rank in range(ranks):
            run, again = boxed.bits(rank, "run"), boxed.bits(rank, "replay")
            assert [*again] == [*range(replay.first_step, replay.step + 1)]
            # Of the last step, a rank may not have come so far.
            assert {step: again[step] for step in run if step in again} == {
                step: bits for step, bits in run.items() if step in again
            }
            assert {*range(replay.first_step, replay.step)} <= run.keys()
