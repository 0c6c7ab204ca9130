"""What ``ec.FiniteGuard`` adds to a training step of a GPT, in processor time.

python benchmarks/guards.py [--steps 12] [--batch 2 --batch 8]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bars import Outcome, bar_table
from models import Block, GPTConfig, gpt_task
from report import console_for_tables, write_report
from torch import nn

import echelon as ec

RANKS = 2
BOUND = 0.01  # of a step
WARM_UP = 2  # steps; the first make the state of the optimizer


def wrapped(name: str, plain: nn.Module, world: ec.World) -> nn.Module:
    if name == "DDP":
        return ec.DDP(plain, world.group)
    return ec.FSDP(plain, world.group, units=ec.units.by_type(Block))


def shares(
    world: ec.World, name: str, layers: int, batch: int, with_norm: bool, steps: int
) -> list[float]:
    """The processor time of the guard over that of the whole step, of each step of this rank."""
    task = gpt_task(world.rank, GPTConfig(layers=layers), batch)
    model = wrapped(name, task.build(), world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    guard = ec.FiniteGuard(model, world.group)
    found = []
    for step in range(WARM_UP + steps):
        inputs, targets = task.batches[step % len(task.batches)]
        start_s = time.process_time()
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        norm = ec.clip_grad_norm_(model, 1.0) if with_norm else None
        world.group.barrier()  # so that the guard does not spin for a rank that is late
        before_s = time.process_time()
        allowed = guard.allows_step(loss, norm)
        guard_s = time.process_time() - before_s
        assert allowed
        optimizer.step()
        found.append(guard_s / (time.process_time() - start_s))
    return found[WARM_UP:]


def main(
    steps: Annotated[int, typer.Option(help="Steps that are measured, in each case.")] = 12,
    batch: Annotated[
        list[int] | None, typer.Option(help="Sequences a rank; several times.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = 8,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure how much of a step a look at loss and gradients takes."""
    cases: list[dict[str, Any]] = []
    outcomes = []
    for sequences in batch or [2, 8]:
        for name in ("DDP", "FSDP"):
            for with_norm in (False, True):
                args = (name, layers, sequences, with_norm, steps)
                found = ec.run(shares, RANKS, "processes", args=args)
                median = max(statistics.median(one) for one in found)
                how = "norm of clipping" if with_norm else "own look"
                case = {"wrapper": name, "batch": sequences, "with_norm": with_norm}
                cases.append({**case, "shares": found, "median": median})
                what = f"{sequences} sequences of {GPTConfig().context} tokens a rank, {name}"
                bar = f"≤ {100 * BOUND:g} % of a step"
                outcomes.append(Outcome(what, how, bar, 100 * median, "%", median <= BOUND))
    console = console_for_tables()
    console.print(bar_table(outcomes))
    path = write_report("guards", outcomes, output, cases=cases)
    console.print(f"All numbers are in {path}")


if __name__ == "__main__":
    typer.run(main)
