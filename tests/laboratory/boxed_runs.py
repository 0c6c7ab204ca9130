"""Trainings with a black box, which leave the bits of each step in files, by rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.comm.world import World
from echelon.laboratory.job_facts import JobFacts, checksum_of, versions
from echelon.launch import run

ROWS, WIDTH = 4, 8


def job_of(script: str, *, ranks: int = 4, backend: str = "gloo", folder: str = "/") -> JobFacts:
    """The facts of a job that has run ``main`` of a script."""
    return JobFacts(
        ranks=ranks,
        backend=backend,
        device="cpu",
        threads=1,
        versions=versions(),
        script=script,
        script_checksum=checksum_of(script),
        module="",
        function="main",
        arguments=("--size", "3"),
        folder=folder,
    )


@dataclass(frozen=True)
class Boxed:
    """How a training is run.

    Attributes:
        folder: of the run.
        kind: of the model: ``"ddp"``, ``"pipeline of fsdp"``, or a method of ``Models``.
        bad_step: in which a row of a rank is NaN; 0 for none.
        bad_rank: whose row that is.
        steps: how many there are.
        every: from one checkpoint to the next.
        action: of the guard.
    """

    folder: Path
    kind: str = "ddp"
    bad_step: int = 0
    bad_rank: int = 1
    steps: int = 8
    every: int = 3
    action: ec.NonFinite = ec.NonFinite.RAISE

    def bits(self, rank: int, kind: str) -> dict[int, list[str]]:
        """The loss and the digest of the gradients of each step, of a ``"run"`` or ``"replay"``."""
        path = self.folder.with_name(f"{kind}-{rank}.txt")
        lines = path.read_text().splitlines() if path.exists() else []
        return {step: bits for step, *bits in map(json.loads, lines)}


def batches(boxed: Boxed, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows that differ between ranks; the loader draws from the streams of the loop, too."""
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(1, boxed.steps + 1):
        x = torch.randn(ROWS, WIDTH, generator=generator)
        if (step, rank) == (boxed.bad_step, boxed.bad_rank):
            x[2, 3] = torch.nan
        torch.rand(rank + 1)
        yield x, x.sum(1, keepdim=True)


def plain(seed: int = 0, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    block = [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Tanh()) for _ in range(layers)
    ]
    return nn.Sequential(*block, nn.Linear(WIDTH, 1))


def digest(tensors: Iterator[torch.Tensor | None]) -> str:
    text = hashlib.sha256()
    for tensor in tensors:
        if tensor is not None:
            text.update(tensor.detach().contiguous().numpy().tobytes())
    return text.hexdigest()


def note_bits(world: World, boxed: Boxed, step: int, loss: Any, model: nn.Module) -> None:
    """Append the bits of a step to the file of this rank."""
    kind = "replay" if world.is_replay else "run"
    row = [
        step,
        "none" if loss is None else loss.item().hex(),
        digest(p.grad for p in model.parameters()),
    ]
    with boxed.folder.with_name(f"{kind}-{world.rank}.txt").open("a") as file:
        file.write(json.dumps(row) + "\n")


def enter(world: World) -> None:
    """Make the world what ``ec.init`` returns; only tests start ranks over gloo without it."""
    if run.entered() is None:
        run.enter(world)


def train_ddp(world: World, boxed: Boxed) -> int:
    """A training by DDP; the number of its last step."""
    enter(world)
    model = ec.DDP(plain(), world.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    guard = ec.FiniteGuard(model, world.group, action=boxed.action)
    torch.manual_seed(10 + world.rank)
    box = ec.Blackbox(
        boxed.folder,
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        guard=guard,
        every=boxed.every,
    )
    for step, (x, y) in box.steps(batches(boxed, world.rank)):
        optimizer.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        box.note(loss=loss)
        note_bits(world, boxed, step, loss, model)
        if guard.allows_step(loss):
            optimizer.step()
        schedule.step()
    return box.step


def train_staged_shards(world: World, boxed: Boxed) -> int:
    """A pipeline of two stages, each of them sharded over two ranks."""
    enter(world)
    mesh = world.mesh(pp=2, shard=2)
    whole = plain(layers=3)
    stages = [whole[:2], whole[2:]]
    stage = mesh["pp"].rank
    stages[stage] = ec.FSDP(stages[stage], mesh["shard"], units=ec.units.by_type(nn.Sequential))
    model = ec.Pipeline(stages, mesh["pp"], microbatches=2, loss_fn=mse_loss, schedule="1f1b")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = ec.FiniteGuard(model, world.group, action=boxed.action)
    torch.manual_seed(10 + world.rank)
    box = ec.Blackbox(
        boxed.folder, model=model, optimizer=optimizer, guard=guard, every=boxed.every
    )
    for step, (x, y) in box.steps(batches(boxed, mesh["shard"].rank)):
        optimizer.zero_grad()
        loss = model.step(x, target=y)
        norm = ec.clip_grad_norm_(model, 1.0)
        box.note(norm=norm)
        note_bits(world, boxed, step, loss, model)
        if guard.allows_step(loss, norm):
            optimizer.step()
    return box.step
