"""Law *Memory* for pipelines: activations alive are those simulated; a step leaves nothing."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import echelon as ec
from echelon.pipeline.packet import SMALL
from echelon.world.base import World
from tests.pipeline.models import Alive, Counted, batch, build, mse
from tests.pipeline.test_parity import SCHEDULES
from tests.worlds import KINDS, run_world

MICROBATCHES = 8


# --- how many ------------------------------------------------------------------------------------


def count(world: World, name: str) -> tuple[int, int]:
    """Most graphs that autograd kept on this rank, and most microbatches that it held."""
    chunks, options = SCHEDULES[name]
    graphs = Alive()
    stages = [Counted(block, graphs) for block in build("plain", world.size * chunks)]
    pipe = ec.Pipeline(
        stages,
        world.group,
        microbatches=MICROBATCHES,
        schedule=name.partition(",")[0],
        loss_fn=mse,
        **options,
    )
    x, y = batch(MICROBATCHES)
    pipe.step(x, target=y)
    assert graphs.now == 0
    return graphs.most, pipe.most_alive


def count_all(world: World, names: list[str]) -> list[tuple[int, int]]:
    return [count(world, name) for name in names]


@pytest.mark.parametrize(
    ("kind", "ranks", "names"),
    [("threads", 4, list(SCHEDULES)), ("processes", 2, ["1f1b", "zb-v"]), ("gloo", 2, ["zb-h1"])],
)
def test_activations_alive_are_those_of_the_simulation(kind, ranks, names) -> None:
    by_rank = run_world(kind, count_all, ranks, (names,))
    for i, name in enumerate(names):
        chunks, options = SCHEDULES[name]
        schedule = ec.pipeline.schedule(
            name.partition(",")[0], ranks * chunks, MICROBATCHES, ranks, **options
        )
        peaks = [round(one * chunks) for one in ec.pipeline.simulate(schedule).peak]
        if name == "1f1b":
            assert peaks == [4, 3, 2, 1][4 - ranks :]
        for (graphs, held), peak in zip((found[i] for found in by_rank), peaks, strict=True):
            assert graphs <= peak, name
            assert held == peak, name
