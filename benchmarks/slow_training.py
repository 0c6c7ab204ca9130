"""A training in which one rank has a slow backward and another one slow data, by any technique."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import echelon as ec

__all__ = ["BACKWARD_S", "LOADING_S", "RANKS", "TECHNIQUES", "SlowTraining"]

TECHNIQUES = ("DDP", "FSDP", "Pipeline")
RANKS = 3
BACKWARD_S, LOADING_S = 0.2, 0.15


class SlowBackward(nn.Module):
    """Changes nothing, and its backward takes longer."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds and x.requires_grad:
            x.register_hook(lambda grad: time.sleep(self.seconds))
        return x


class Batches(torch.utils.data.IterableDataset[tuple[Tensor, Tensor]]):
    """A batch for each step, after some seconds."""

    def __init__(self, training: SlowTraining, seconds: float) -> None:
        super().__init__()
        self.training, self.seconds = training, seconds

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.training.steps):
            time.sleep(self.seconds)
            x = torch.randn(self.training.rows, self.training.width)
            yield x, x


@dataclass(frozen=True, kw_only=True)
class SlowTraining:
    """How much is computed.

    Attributes:
        steps: how many.
        width: of each layer.
        layers: of each stage; there is a stage for each rank.
        microbatches: of a pipeline.
        rows: of a batch.
    """

    steps: int
    width: int
    layers: int
    microbatches: int
    rows: int

    def stages(self, slow_s: float) -> list[nn.Module]:
        """The parts of the model, with a backward that takes so much longer in each of them."""
        torch.manual_seed(0)
        width = self.width
        return [
            nn.Sequential(
                *(
                    layer
                    for _ in range(self.layers)
                    for layer in (nn.Linear(width, width), nn.Tanh())
                ),
                SlowBackward(slow_s),
                nn.Tanh(),
            )
            for _ in range(RANKS)
        ]

    def run(self, world: ec.World, technique: str, backward_s: float, loading_s: float) -> None:
        """Train, with a backward of rank 1 and a loader of rank 2 that take so much longer."""
        passes = self.microbatches if technique == "Pipeline" else RANKS  # through such a module
        plain = self.stages(backward_s / passes if world.rank == 1 else 0.0)
        model: Any
        if technique == "Pipeline":
            model = ec.Pipeline(
                plain, world.group, microbatches=self.microbatches, loss_fn=mse_loss
            )
        elif technique == "DDP":
            model = ec.DDP(nn.Sequential(*plain), world.group)
        else:
            model = ec.FSDP(nn.Sequential(*plain), world.group, units=ec.units.by_type(nn.Linear))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = Batches(self, loading_s if world.rank == 2 else 0.0)
        for x, y in torch.utils.data.DataLoader(data, batch_size=None):
            if technique == "Pipeline":
                model.step(x, target=y)
            else:
                mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
