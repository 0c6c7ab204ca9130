"""The norm of complex gradients is real, and gradients are clipped by it."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import echelon as ec
from tests.worlds import KINDS, run_world

CLOSE = {"rtol": 1e-11, "atol": 1e-13}
ORDERS = (2.0, 1.0, 3.0, math.inf)


class Waves(nn.Module):
    """Complex weights, and real ones."""

    def __init__(self) -> None:
        super().__init__()
        phases = torch.arange(5, dtype=torch.float64)
        self.waves = nn.Parameter(torch.polar(phases + 1, phases))
        self.gain = nn.Parameter(phases + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.waves).abs() * self.gain


def rows(rank: int) -> Tensor:
    return torch.full((1, 5), rank + 1.0, dtype=torch.float64)


def plain_stages() -> nn.Sequential:
    return nn.Sequential(Waves(), Waves())


def mean(output: Tensor, target: Tensor) -> Tensor:
    return output.square().mean()


def wrapped(world: ec.World, technique: str) -> nn.Module:
    model: Any
    if technique == "pipeline":
        model = ec.Pipeline([Waves(), Waves()], world.group, microbatches=2, loss_fn=mean)
        batch = torch.cat([rows(0), rows(1)])
        model.step(batch, target=batch)
        return model
    if technique == "ddp":
        model = ec.DDP(plain_stages(), world.group)
    else:
        layout = "rows" if technique == "fsdp by rows" else "flat"
        model = ec.FSDP(plain_stages(), world.group, min_num_params=0, layout=layout)
    model(rows(world.rank)).square().mean().backward()
    return model


def check(world: ec.World) -> None:
    for technique in ("ddp", "fsdp", "fsdp by rows", "pipeline"):
        for order in ORDERS:
            expected = plain_stages()
            expected(torch.cat([rows(0), rows(1)])).square().mean().backward()
            wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.5, order)
            model = wrapped(world, technique)
            found = ec.clip_grad_norm_(model, 0.5, order)
            torch.testing.assert_close(found, wanted, **CLOSE, msg=f"{technique} {order}")
            again = ec.clip_grad_norm_(model, math.inf, order)
            torch.testing.assert_close(again, wanted.new_tensor(0.5), rtol=1e-4, atol=0)
            if technique.startswith("fsdp"):
                model = wrapped(world, technique)
                found = nn.utils.clip_grad_norm_(model.parameters(), 0.5, order)
                torch.testing.assert_close(found, wanted, **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_models_with_complex_weights_are_clipped_as_in_one_process(kind: str) -> None:
    run_world(kind, check, 2)
