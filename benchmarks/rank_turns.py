"""How long simulated ranks take to hand on a turn, and what turns cost a training.

    python benchmarks/rank_turns.py [--turns 2000] [--rounds 5] [--steps 3]

Ranks that do nothing but hand on are measured with and without ``torch.distributed``. Four ranks
train a GPT with DDP, and one rank alone does, in alternation: in turns, a step of four takes as
long as four steps of one, and what the turns cost. Last, 64 ranks all-reduce 1 MiB each.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from models import GPTConfig, gpt_task
from report import console_for_tables, markdown_table, write_report

import echelon as ec

WARM_UP = 50
RANKS = 4  # of the training


def hand_on(world: ec.World, turns: int, with_groups: bool) -> float:
    """The seconds in which the ranks of the world hand on ``turns`` times each."""
    if with_groups:
        dist.init_process_group("echelon")
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    message = world.group.irecv(torch.empty(1), before)  # to ask for one that is not there hands on
    for _ in range(WARM_UP):
        message.done()
    world.group.barrier()
    start_s = time.perf_counter()
    for _ in range(turns):
        message.done()
    seconds = time.perf_counter() - start_s
    world.group.barrier()
    world.group.isend(torch.ones(1), after).wait()
    message.wait()
    if with_groups:
        dist.destroy_process_group()
    return seconds


def train(world: ec.World, steps: int) -> float:
    """The median seconds of a step of the GPT with DDP, after one that allocates."""
    task = gpt_task(world.rank, GPTConfig())
    model = ec.DDP(task.build(), world.group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    inputs, targets = task.batches[0]
    seconds = []
    for _ in range(steps + 1):
        world.group.barrier()
        start_s = time.perf_counter()
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        world.group.barrier()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[1:])


def step_s(steps: int, ranks: int) -> float:
    """The seconds of a step of so many ranks, each of which uses all cores in its turn."""
    torch.set_num_threads(os.cpu_count() or 1)
    return max(ec.run(train, ranks, args=(steps,)))


def all_reduce(world: ec.World) -> float:
    """The seconds of an all-reduce of 1 MiB, after one that warms up."""
    tensor = torch.ones(2**18)
    world.group.all_reduce(tensor)
    world.group.barrier()
    start_s = time.perf_counter()
    world.group.all_reduce(tensor)
    world.group.barrier()
    return time.perf_counter() - start_s


def main(
    turns: Annotated[int, typer.Option(help="Turns of all ranks together.")] = 2000,
    rounds: Annotated[int, typer.Option(help="Runs of each case, in alternation.")] = 5,
    steps: Annotated[int, typer.Option(help="Timed steps of a training.")] = 3,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure ranks that do nothing but hand on, a training, and many ranks."""
    torch.set_num_threads(1)
    cases = [(ranks, with_groups) for with_groups in (False, True) for ranks in (2, 8)]
    seconds: list[list[float]] = [[] for _ in cases]
    for _ in range(rounds):
        for samples, (ranks, with_groups) in zip(seconds, cases, strict=True):
            each = max(1, turns // ranks)
            slowest = max(ec.run(hand_on, ranks, args=(each, with_groups)))
            samples.append(slowest / (each * ranks))
    table = markdown_table("handing on", ["ranks", "torch.distributed"], ["median µs", "least µs"])
    for samples, (ranks, with_groups) in zip(seconds, cases, strict=True):
        median, least = statistics.median(samples), min(samples)
        used = "initialised" if with_groups else "not used"
        table.add_row(f"{ranks}", used, f"{median * 1e6:.1f}", f"{least * 1e6:.1f}")
    console = console_for_tables()
    console.print(table)
    pairs = [(step_s(steps, RANKS), step_s(steps, 1)) for _ in range(rounds)]
    in_turns, alone = zip(*pairs, strict=True)
    ratio = statistics.median(a / (RANKS * b) for a, b in pairs)
    trained = markdown_table(
        "a step of the GPT, DDP", [], [f"{RANKS} ranks, s", "1 rank, s", f"ratio to {RANKS} times"]
    )
    medians = f"{statistics.median(in_turns):.3f}", f"{statistics.median(alone):.3f}"
    trained.add_row(*medians, f"{ratio:.2f}")
    console.print(trained)
    torch.set_num_threads(1)
    many = [max(ec.run(all_reduce, 64)) for _ in range(rounds)]
    console.print(f"all-reduce of 1 MiB, 64 ranks: {statistics.median(many):.3f} s")
    named = [
        {"ranks": ranks, "with_groups": with_groups, "seconds": samples}
        for samples, (ranks, with_groups) in zip(seconds, cases, strict=True)
    ]
    path = write_report(
        "rank_turns",
        [],
        output,
        settings={"turns": turns, "steps": steps},
        cases=named,
        training={"ranks": RANKS, "turns": in_turns, "alone": alone},
        all_reduce_of_64=many,
    )
    console.print(f"All numbers are in {path}")


if __name__ == "__main__":
    typer.run(main)
