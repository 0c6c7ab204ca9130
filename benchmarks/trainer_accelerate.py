"""Accelerate for ``trainers.py``: its own DDP and FSDP over gloo, and ``EchelonAccelerator``."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from accelerate import Accelerator
from bars import Bar, Kind
from models import UNITS, Task
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import echelon as ec
import echelon.c10d
from echelon.integrations.accelerate import EchelonAccelerator

__all__ = ["BARS", "VARIANTS", "sharded_by_torch", "train"]

DDP_GLOO, DDP_ZERO, DDP_OURS = "ddp on gloo", "ddp on echelon.c10d", "echelon ddp"
FSDP_GLOO, FSDP_OURS = "fsdp on gloo", "echelon fsdp"
VARIANTS = [DDP_GLOO, DDP_ZERO, DDP_OURS, FSDP_GLOO, FSDP_OURS]
BARS = (
    Bar(task="Accelerate step", name=DDP_ZERO, kind=Kind.FASTER, bound=1.0, peer=DDP_GLOO),
    Bar(task="Accelerate step", name=DDP_OURS, kind=Kind.FASTER, bound=1.08, peer=DDP_GLOO),
    Bar(task="Accelerate step", name=FSDP_OURS, kind=Kind.FASTER, bound=1.5, peer=FSDP_GLOO),
)


def accelerator_of(variant: str) -> Accelerator:
    """What the user would write."""
    if variant == DDP_OURS:
        return EchelonAccelerator(plan="ddp")
    if variant == FSDP_OURS:
        return EchelonAccelerator(
            plan="fsdp", units=ec.units.by_type(*UNITS), options={"min_num_params": 0}
        )
    if variant == DDP_ZERO:
        dist.init_process_group(echelon.c10d.BACKEND)
    return Accelerator(cpu=True)


def sharded_by_torch(model: nn.Module) -> nn.Module:
    """The model as Accelerate's FSDP wraps it, which Accelerate itself refuses on the CPU."""
    sharded = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy(UNITS),
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    sharded._is_accelerate_prepared = True  # type: ignore[assignment]  # so it is left alone
    return sharded


def train(variant: str, task: Task, loader: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Train until the loader ends; the losses of this rank."""
    accelerator = accelerator_of(variant)
    model = task.build()
    if variant == FSDP_GLOO:
        model = sharded_by_torch(model)
    model = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True))
    losses = []
    for tokens, targets in loader:
        loss = task.loss(model(tokens), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]
