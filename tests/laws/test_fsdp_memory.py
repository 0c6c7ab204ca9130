"""Law *Memory*: what a sharded model takes at most, measured as bytes of live tensors."""

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.comm.world import World
from tests.fsdp.live import Live
from tests.worlds import run_world

LAYERS, WIDTH = 6, 128
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
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(1, WIDTH)).sum().backward()
            optimizer.step()
        now = live.now()
    stats = model.memory_stats(optimizer)
    part = LAYERS * UNIT // RANKS
    assert (stats.shards, stats.gradients) == (part, part)
    assert stats.optimizer == 2 * part + 4 * 2 * LAYERS  # moments, and the number of steps
    assert stats.gathered == 0
    if not world.group.shares_memory:
        assert stats.peak_gathered == 2 * UNIT
        assert stats.peak_gradients == part + UNIT
        assert abs(now - sum(stats.by_category().values())) < 2048  # outputs, numbers of steps
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threads", "gloo"])
def test_a_step_takes_the_parts_and_two_units_with_their_gradients(kind) -> None:
    parts = 4 * LAYERS * UNIT // RANKS  # parameters, gradients, two moments
    allowed = 1.02 * (parts + 2 * UNIT + 2 * UNIT)
    peaks = run_world(kind, weigh, RANKS)
    # What threads share was made by one of them.
    assert parts < sum(peaks) / RANKS <= allowed


# --- padding -------------------------------------------------------------------------------------

SHAPES = [(1, 1025, 8), (1025, 1, 3), (63,), (65, 7), (1,), (), (4097, 3)]


class Weights(nn.Module):
    """Parameters of shapes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in SHAPES)

    def forward(self) -> torch.Tensor:
        return torch.stack([one.sum() for one in self.weights]).sum()


def hold(world: World) -> tuple[int, int]:
    """Bytes of this rank's parts and of their gradients."""
    model = ec.FSDP(Weights(), world.group)
    model().backward()
    stats = model.memory_stats()
    return stats.shards, stats.gradients


@pytest.mark.slow
def test_64_ranks_pad_nothing_whatever_the_shapes() -> None:
    whole = sum(torch.Size(shape).numel() for shape in SHAPES) * 4
    held = ec.run(hold, 64)
    assert [sum(category) for category in zip(*held, strict=True)] == [whole, whole]
    assert max(held)[0] - min(held)[0] <= 4  # one element
