"""A training with Accelerate, as a user writes it, that tests run in several ways."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

GLOBAL_BATCH = 12
NUM_ROWS = 84  # seven batches, so that accumulating two does not divide the epoch
MAX_NORM = 0.5


class Tied(nn.Module):
    """Has a frozen layer, and one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.last = nn.Linear(8, 1)
        self.again.weight = self.first.weight
        self.frozen.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.frozen, self.again):
            x = torch.tanh(layer(x))
        return self.last(x)


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Training:
    """Two models, prepared by one accelerator."""

    def __init__(self, make: Callable[..., Accelerator], **options: Any) -> None:
        config = {"use_seedable_sampler": True, "data_seed": 3, **options.pop("loading", {})}
        split = config.get("split_batches", False)
        self.accelerator = make(
            gradient_accumulation_steps=2,
            dataloader_config=DataLoaderConfiguration(**config),
            **options,
        )
        torch.manual_seed(0)
        models = [Tied().double(), nn.Linear(8, 1).double()]
        optimizers = [
            torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.01)
            for model in models
        ]
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
            for optimizer in optimizers
        ]
        rows = torch.randn(NUM_ROWS, 8, generator=torch.Generator().manual_seed(5)).double()
        batch = GLOBAL_BATCH // (1 if split else world_size())
        dataset = TensorDataset(rows, rows.sum(1, keepdim=True))
        loader = DataLoader(dataset, batch_size=batch, shuffle=True)
        prepare = self.accelerator.prepare
        self.models = list(prepare(*models))
        self.optimizers = list(prepare(*optimizers))
        self.loader = prepare(loader)
        # Accelerate steps a schedule once for each process.
        self.accelerator.step_scheduler_with_optimizer = False
        self.schedules = list(prepare(*schedules))
        self.epoch = 0

    def steps(self, num_epochs: int, skip: int = 0) -> Iterator[float]:
        """The loss of each batch, averaged over ranks."""
        accelerator = self.accelerator
        for epoch in range(self.epoch, num_epochs):
            self.loader.set_epoch(epoch)
            batches = self.loader
            if skip:
                batches, skip = accelerator.skip_first_batches(batches, skip), 0
                batches.set_epoch(epoch)
            for x, y in batches:
                with accelerator.accumulate(*self.models):
                    loss = sum(F.mse_loss(model(x), y) for model in self.models)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        for model in self.models:
                            accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
                        for optimizer, schedule in zip(
                            self.optimizers, self.schedules, strict=True
                        ):
                            optimizer.step()
                            schedule.step()
                    for optimizer in self.optimizers:
                        optimizer.zero_grad()
                yield accelerator.gather_for_metrics(loss.detach()[None]).mean().item()
            self.epoch = epoch + 1

    def weights(self) -> dict[str, Tensor]:
        """The state of both models, where Accelerate gives it."""
        states = [self.accelerator.get_state_dict(model) for model in self.models]
        return {
            f"{place}.{name}": value.clone()
            for place, state in enumerate(states)
            for name, value in state.items()
        }


def train(
    make: Callable[..., Accelerator], **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Three epochs: 12 steps of each optimizer."""
    training = Training(make, **options)
    losses = list(training.steps(3))
    return losses, training.weights()
