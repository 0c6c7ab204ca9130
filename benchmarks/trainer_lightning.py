"""Lightning's Trainer for ``trainers.py``: its own DDP and FSDP over gloo, and our strategies."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import torch
from bars import Bar, Kind
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from models import UNITS, Task
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from trainer_turns import TurnLoader

import echelon as ec
import echelon.c10d
from echelon.integrations.lightning import EchelonStrategy

__all__ = ["BARS", "VARIANTS", "train"]

DDP_GLOO, DDP_ZERO, DDP_OURS = "ddp on gloo", "ddp on echelon.c10d", "echelon_ddp"
FSDP_GLOO, FSDP_OURS = "fsdp on gloo", "echelon_fsdp"
VARIANTS = [DDP_GLOO, DDP_ZERO, DDP_OURS, FSDP_GLOO, FSDP_OURS]
BARS = (
    Bar(task="Trainer step", name=DDP_ZERO, kind=Kind.FASTER, bound=1.0, peer=DDP_GLOO),
    Bar(task="Trainer step", name=DDP_OURS, kind=Kind.FASTER, bound=1.08, peer=DDP_GLOO),
    Bar(task="Trainer step", name=FSDP_OURS, kind=Kind.FASTER, bound=1.5, peer=FSDP_GLOO),
)


class CpuFSDPStrategy(FSDPStrategy):
    """Lightning's FSDP, which Lightning itself refuses on the CPU, with a unit for each block."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            device_id=self.root_device,
            sharding_strategy=self.sharding_strategy,
            **self.kwargs,
        )


def strategy_of(variant: str) -> Strategy:
    """What the user would write, with the settings that make each fastest."""
    if variant in (DDP_GLOO, DDP_ZERO):
        backend = "gloo" if variant == DDP_GLOO else echelon.c10d.BACKEND
        return DDPStrategy(process_group_backend=backend, gradient_as_bucket_view=True)
    if variant == FSDP_GLOO:
        return CpuFSDPStrategy(process_group_backend="gloo", auto_wrap_policy=set(UNITS))
    if variant == FSDP_OURS:
        return EchelonStrategy("fsdp", units=ec.units.by_type(*UNITS), min_num_params=0)
    return EchelonStrategy("ddp")


class LitTask(L.LightningModule):
    """The task as a LightningModule."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net, self.loss, self.losses = task.build(), task.loss, list[Tensor]()

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        """The loss of a batch."""
        loss = self.loss(self.net(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the other benchmarks."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=True)


def train(variant: str, task: Task, loader: TurnLoader) -> list[float]:
    """Train until the loader ends; the losses of this rank."""
    model = LitTask(task)
    trainer: Any = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=strategy_of(variant),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    return [loss.item() for loss in model.losses]
