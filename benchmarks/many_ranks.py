"""64 simulated ranks take one step of a GPT of 12 blocks; the weights are those of one process.

python benchmarks/many_ranks.py [--ranks 64] [--layers 12]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from bars import Outcome, bar_table
from models import Block, GPTConfig, Task, gpt_task
from report import console_for_tables, write_report
from torch import Tensor, nn

import echelon as ec

BOUND_S = 60.0


def update(model: nn.Module, task: Task, batch: tuple[Tensor, Tensor]) -> None:
    """One step; plain SGD, so that a wrong gradient is a wrong weight, and as wrong."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    task.loss(model(batch[0]), batch[1]).backward()
    optimizer.step()


def step_of_a_rank(world: ec.World, config: GPTConfig) -> dict[str, Tensor] | None:
    """Shard the model and take a step; rank 0 gets the whole weights."""
    task = gpt_task(world.rank, config, batch=1)
    model = ec.FSDP(task.build(), world.group, units=ec.units.by_type(Block))
    update(model, task, task.batches[0])
    return model.whole_state_dict(rank0_only=True) or None


def step_of_one_process(ranks: int, config: GPTConfig) -> dict[str, Tensor]:
    """The same step on the batches of all ranks together."""
    tasks = [gpt_task(rank, config, batch=1) for rank in range(ranks)]
    batches = [task.batches[0] for task in tasks]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    model = tasks[0].build()
    update(model, tasks[0], (inputs, targets))
    return model.state_dict()


def main(
    ranks: Annotated[int, typer.Option(help="Number of simulated ranks.")] = 64,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = 12,
    width: Annotated[int, typer.Option(help="Of the model.")] = 128,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure one step of many simulated ranks, from start to stop, and compare the weights."""
    torch.set_num_threads(1)
    config = GPTConfig(layers=layers, width=width, vocabulary=512, context=32)
    start_s = time.perf_counter()
    weights = ec.run(step_of_a_rank, ranks, args=(config,))[0]
    seconds = time.perf_counter() - start_s
    expected = step_of_one_process(ranks, config)
    assert weights is not None
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5, msg=name)
    difference = max((weights[n] - value).abs().max().item() for n, value in expected.items())
    num_parameters = sum(value.numel() for value in expected.values())
    task = f"{ranks} simulated ranks, {layers} blocks, {num_parameters / 1e6:.1f} M parameters"
    bar = f"≤ {BOUND_S:g} s, weights of one process"
    outcome = Outcome(task, "echelon FSDP", bar, seconds, "s", seconds <= BOUND_S)
    console = console_for_tables()
    console.print(bar_table([outcome]))
    console.print(f"The weights differ from those of one process by at most {difference:.1e}")
    settings = {"ranks": ranks, "layers": layers, "width": width}
    path = write_report(
        "many_ranks",
        [outcome],
        output,
        settings=settings,
        seconds=seconds,
        largest_difference=difference,
    )
    console.print(f"All numbers are in {path}")


if __name__ == "__main__":
    typer.run(main)
