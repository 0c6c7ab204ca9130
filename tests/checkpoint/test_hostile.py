"""A checkpoint of a stranger is data: refused in time and memory, and nothing of it is executed."""

from __future__ import annotations

import copy
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import echelon as ec
from echelon.comm.streams import device_of
from echelon.comm.world import World
from echelon.errors import CheckpointError
from tests.checkpoint.hostile_steps import CANARY, Targets, attacks, save_good
from tests.checkpoint.whole import check_equal

MOST_S = 2.0
MOST_NBYTES = 200 * 2**20  # besides the files


def attack_all(world: World, folder: Path) -> list[tuple[str, str, float]]:
    """Load every one of them; the name, what was raised, and the seconds."""
    good = save_good(folder / "good")
    ec.load(folder / "good", **Targets(1).given)  # what is imported and made once
    seen = []
    before = device_of(torch.device("cpu")).memory_peak()
    for i, (name, attack) in enumerate(attacks(folder / CANARY)):
        root = folder / str(i)
        shutil.copytree(folder / "good", root)
        attack(root / good.name)
        targets = Targets(1)
        state = copy.deepcopy(targets.state())
        random.seed(i), np.random.seed(i), torch.manual_seed(i)
        draws = random.getstate(), torch.get_rng_state()
        start_s = time.process_time()
        try:
            ec.load(root, **targets.given)
            raised = "nothing"
        except CheckpointError as error:
            raised = f"{type(error).__name__}: {error}"
        except Exception as error:
            raised = f"an error of no type of ours, {type(error).__name__}: {error}"
        seen.append((name, raised, time.process_time() - start_s))
        check_equal(targets.state(), state)
        assert random.getstate() == draws[0], name
        assert torch.equal(torch.get_rng_state(), draws[1]), name
        assert targets.model[0].count == 3, name
        more = device_of(torch.device("cpu")).memory_peak() - before
        assert more < MOST_NBYTES, (name, more)
        shutil.rmtree(root)
    return seen


@pytest.mark.slow
def test_a_hostile_checkpoint_is_refused_and_nothing_is_executed_or_changed(tmp_path: Path) -> None:
    seen = ec.run(attack_all, 1, "processes", args=(tmp_path,))[0]
    assert not (tmp_path / CANARY).exists()
    assert len(seen) >= 100
    for name, raised, seconds in seen:
        assert raised.startswith("Checkpoint"), (name, raised)
        assert seconds < MOST_S, (name, seconds)
