"""``Trainer`` of transformers for ``trainers.py``: its own DDP and FSDP, and ``EchelonTrainer``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from bars import Bar, Kind
from models import UNITS, Task
from torch import Tensor, nn
from trainer_accelerate import (
    DDP_GLOO,
    DDP_OURS,
    DDP_ZERO,
    FSDP_GLOO,
    FSDP_OURS,
    VARIANTS,
    sharded_by_torch,
)
from transformers import Trainer, TrainingArguments

import echelon as ec
import echelon.c10d
from echelon.integrations.transformers import EchelonTrainer

__all__ = ["BARS", "VARIANTS", "train"]

BARS = (
    Bar(task="Trainer step", name=DDP_ZERO, kind=Kind.FASTER, bound=1.0, peer=DDP_GLOO),
    Bar(task="Trainer step", name=DDP_OURS, kind=Kind.FASTER, bound=1.08, peer=DDP_GLOO),
    Bar(task="Trainer step", name=FSDP_OURS, kind=Kind.FASTER, bound=1.5, peer=FSDP_GLOO),
)
_MOST_STEPS = 10**9  # the loader ends first


class WithLoss(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.net, self._task = task.build(), task

    def forward(self, tokens: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self._task.loss(self.net(tokens), labels)}


class Batches:
    """The loader in the form of ``Trainer``, which is stopped when it ends."""

    def __init__(self, loader: Iterable[tuple[Tensor, Tensor]]) -> None:
        self._loader, self.trainer = loader, None

    trainer: Any

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for tokens, targets in self._loader:
            yield {"tokens": tokens, "labels": targets}
        self.trainer.control.should_training_stop = True


def train(variant: str, task: Task, loader: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Train until the loader ends; the losses of this rank."""
    if variant == DDP_ZERO:
        dist.init_process_group(echelon.c10d.BACKEND)
    losses: list[Tensor] = []
    batches = Batches(loader)

    class Measured(EchelonTrainer if variant in (DDP_OURS, FSDP_OURS) else Trainer):
        def get_train_dataloader(self) -> Any:
            return batches

        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss)
            return loss

    own: dict[str, Any] = {}
    if variant == FSDP_OURS:
        units = ec.units.by_type(*UNITS)
        own = {"plan": "fsdp", "units": units, "options": {"min_num_params": 0}}
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=_MOST_STEPS,
            max_grad_norm=0,  # FSDP on the CPU would clip each shard by its own norm
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            ddp_find_unused_parameters=False,  # which makes the peer faster
            weight_decay=0.01,
            logging_strategy="no",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model: nn.Module = WithLoss(task)
        model = sharded_by_torch(model) if variant == FSDP_GLOO else model
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=True)
        trainer: Any = Measured(model=model, args=args, optimizers=(optimizer, None), **own)
        batches.trainer = trainer
        trainer.train()
    return [loss.item() for loss in losses]
