"""recompute=True changes memory and time: buffers and gradients are those of one forward."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from echelon.comm.world import World
from tests.reference import mse
from tests.worlds import run_world

_LARGE = (1 << 16) + 1  # elements; from there on torch counts all changes


class Writes(nn.Module):
    """A forward that uses buffers and writes them: in place, by exchange, and a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("inside", torch.zeros(6))
        self.register_buffer("large", torch.zeros(_LARGE))
        self.register_buffer("constant", torch.ones(_LARGE))
        self.register_buffer("exchanged", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * self.constant[:6] + self.exchanged + self.inside + self.large[0]
        with torch.no_grad():
            self.inside.add_(x.mean())
            self.large += 0.5
            self.exchanged = self.exchanged * 1.5
        return torch.tanh(y)


KINDS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "written": Writes,
    "twice": lambda: nn.Sequential(*[nn.BatchNorm1d(6)] * 2),
    "none": lambda: nn.Linear(6, 6),
}


def trained(world: World, kind: str, schedule: str, chunks: int, *, recompute: bool) -> list[Any]:
    torch.manual_seed(0)
    stages = [nn.Sequential(KINDS[kind](), nn.Linear(6, 6)).double() for _ in range(2 * chunks)]
    pipe = ec.Pipeline(
        stages,
        world.group,
        microbatches=4,
        schedule=schedule,
        loss_fn=mse,
        recompute=recompute,
    )
    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    for _ in range(2):
        pipe.step(x, target=y)
    return [*pipe.buffers(), *(param.grad for param in pipe.parameters())]


def recomputed_is_as_not(world: World) -> None:
    for schedule, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)):
        for kind in KINDS:
            plain, again = (
                trained(world, kind, schedule, chunks, recompute=recompute)
                for recompute in (False, True)
            )
            for value, other in zip(plain, again, strict=True):
                assert torch.equal(value, other), (kind, schedule)


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_buffers_and_gradients_with_recompute_are_those_of_one_forward(kind: str) -> None:
    run_world(kind, recomputed_is_as_not, 2)
