"""Law *Memory*: what a sharded model takes at most, measured as bytes of live tensors."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.world.base import World
from tests.fsdp.live import Live
from tests.worlds import run_world

LAYERS, WIDTH = 10, 128
UNIT = (WIDTH * WIDTH + WIDTH) * 4
RANKS = 2


def weigh(world: World) -> int:
    """The peak of a few steps; one row of input, so activations are tiny."""
    with Live() as live:
        model = ec.FSDP(
            nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]),
            world.group,
            units=ec.units.by_type(nn.Linear),
        )
        # One parameter after another: foreach takes as much again for what is in between.
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        live.peak = 0
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(1, WIDTH)).sum().backward()
            optimizer.step()
    return live.peak


@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_step_takes_the_parts_and_two_units_with_their_gradients(kind) -> None:
    parts = 4 * LAYERS * UNIT // RANKS  # parameters, gradients, two moments
    allowed = 1.02 * (parts + 2 * UNIT + 2 * UNIT)
    peaks = run_world(kind, weigh, RANKS)
    # What threads share was made by one of them.
    assert parts < sum(peaks) / RANKS <= allowed
