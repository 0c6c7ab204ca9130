"""The ranks of ``held_up.py``: they train with slow ranks or without, and ask who held them up.

``echelon run`` starts this file for gloo, with the techniques, a number of runs and the file for
the verdicts.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from models import Block, GPTConfig, gpt_task
from slow_training import BACKWARD_S, LOADING_S, RANKS, TECHNIQUES, SlowTraining
from torch import nn

import echelon as ec
from echelon.diagnosis.rank_time import RankTime
from echelon.observe import held_up

__all__ = ["RANKS", "TECHNIQUES", "cost_of", "verdicts_of"]

# The first step does not count, and three in four of the others must show a cost: of five, four.
TRAINING = SlowTraining(steps=6, width=128, layers=3, microbatches=4, rows=64)
NUM_CALLS = 5000  # of a function whose cost is measured
WARM_UP = 2


def verdicts_of(
    world: ec.World, techniques: Sequence[str], runs: int
) -> dict[str, dict[str, list[list[Any]]]]:
    """What is said by technique after so many runs with slow ranks, and without."""
    return {technique: _verdicts(world, technique, runs) for technique in techniques}


def _verdicts(world: ec.World, technique: str, runs: int) -> dict[str, list[list[Any]]]:
    """After each run: rank, activity and seconds of each cost."""
    verdicts: dict[str, list[list[Any]]] = {"slow": [], "usual": []}
    for _ in range(runs):
        for name, seconds in (("slow", (BACKWARD_S, LOADING_S)), ("usual", (0.0, 0.0))):
            world.steps.stop()
            world.step = 0  # the steps of a new optimizer count from here
            world.steps.measure()
            TRAINING.run(world, technique, *seconds)
            costs = held_up(world)
            verdicts[name].append([[c.rank, c.activity.name, c.seconds] for c in costs])
    return verdicts


def _seconds_of(function: Any) -> float:
    start_s = time.perf_counter()
    for _ in range(NUM_CALLS):
        function()
    return (time.perf_counter() - start_s) / NUM_CALLS


def cost_of(world: ec.World, name: str, layers: int, batch: int, rounds: int) -> dict[str, Any]:
    """The cost of measuring in a step of the GPT: in pairs of steps, and added up."""
    task = gpt_task(world.rank, GPTConfig(layers=layers), batch)
    model: nn.Module
    if name == "DDP":
        model = ec.DDP(task.build(), world.group)
    else:
        model = ec.FSDP(task.build(), world.group, units=ec.units.by_type(Block))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    changes = 0

    def counting() -> int:
        nonlocal changes
        changes += 1
        return time.perf_counter_ns()

    def step(number: int) -> float:
        inputs, targets = task.batches[number % len(task.batches)]
        world.group.barrier()
        start_s = time.perf_counter()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        world.group.barrier()
        return time.perf_counter() - start_s

    seconds: dict[str, list[float]] = {"measured": [], "not measured": []}
    for number in range(WARM_UP + rounds):
        for name in seconds if number % 2 else reversed(seconds):
            world.steps.stop()
            if name == "measured":
                world.steps.measure()
            seconds[name].append(step(number))
    world.steps.stop()
    world.steps.time = RankTime(clock=counting)
    world.steps.measure()
    changes = 0
    step(0)
    num_changes = changes
    world.steps.stop()
    clock = RankTime()
    clock.start()
    change_s = _seconds_of(lambda: clock.end(clock.begin_call())) / 2
    read_s = _seconds_of(clock.read_kernel)
    row_s = _seconds_of(clock.end_step)
    clock.stop()
    return {
        "seconds": {name: values[WARM_UP:] for name, values in seconds.items()},
        "changes": num_changes,
        "cost_s": num_changes * (change_s + read_s) + row_s,
    }


if __name__ == "__main__":
    techniques, runs, output = sys.argv[1:]
    with ec.init("gloo") as job:
        verdicts = verdicts_of(job, techniques.split(","), int(runs))
        if job.rank == 0:
            Path(output).write_text(json.dumps(verdicts))
