"""How long a training step takes with echelon's DDP, PyTorch's DDP and no communication.

    python benchmarks/ddp.py [--quick]

All variants live in the same two processes and take turns, each with a model and an AdamW of its
own and the same batches. Afterwards their weights are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bars import Bar, Kind, Outcome, bar_table, judge
from models import GPTConfig, Task, gpt_task, many_small_task
from pairs import Samples, Variant, alternate, num_rounds_within
from peak import PeakMemory
from peers import Peers
from ranks import on_ranks
from report import console_for_tables, machine, versions, write_json
from rich import box
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import echelon as ec

ECHELON, TORCH, STATIC = "echelon DDP", "PyTorch DDP", "PyTorch DDP, static graph"
ALONE, APART = "one process alone", "all ranks, no communication"
VARIANTS = (ECHELON, TORCH, STATIC, ALONE, APART)
GPT, MANY_SMALL = "gpt", "many-small"

BARS = {
    GPT: (
        Bar(task="GPT step", name=ECHELON, kind=Kind.WITHIN, bound=1.06, peer=ALONE),
        Bar(task="GPT step", name=ECHELON, kind=Kind.FASTER, bound=1.08, peer=TORCH),
    ),
    MANY_SMALL: (
        Bar(task="many small step", name=ECHELON, kind=Kind.FASTER, bound=1.5, peer=TORCH),
    ),
}


# --- on a rank ---------------------------------------------------------------------------------


class Trainee:
    """One model with its optimizer, trained one batch at a time.

    Args:
        name: of the variant, which decides the wrapper.
    """

    def __init__(self, name: str, task: Task, peers: Peers) -> None:
        self.plain = task.build()
        self.model = wrapped(name, self.plain, peers)
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-4, foreach=True)
        self._task = task
        self.num_steps = 0
        self.losses: list[float] = []

    def step(self) -> None:
        """One step of a usual training loop."""
        batches = self._task.batches
        inputs, targets = batches[self.num_steps % len(batches)]
        self.optimizer.zero_grad()
        loss = self._task.loss(self.model(inputs), targets)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())
        self.num_steps += 1


def wrapped(name: str, model: nn.Module, peers: Peers) -> nn.Module:
    """The model in the wrapper of a variant; PyTorch's with the settings that make it fastest."""
    if name == ECHELON:
        return ec.DDP(model, peers.group)
    if name in (TORCH, STATIC):
        return DistributedDataParallel(
            model, gradient_as_bucket_view=True, static_graph=name == STATIC
        )
    return model


def task_of(settings: dict[str, Any], rank: int) -> Task:
    """What is trained, with the batches of ``rank``."""
    if settings["task"] == MANY_SMALL:
        return many_small_task(rank, layers=settings["layers"] or 200)
    return gpt_task(rank, GPTConfig(**{"layers": settings["layers"]} if settings["layers"] else {}))


def measure_rank(peers: Peers, settings: dict[str, Any]) -> dict[str, Any]:
    """Time all variants of one task."""
    task = task_of(settings, peers.rank)
    names = settings["variants"]
    trainees = {n: Trainee(n, task, peers) for n in names if n != ALONE}
    # Without communication it is the same thing, with the other ranks idle.
    trainees[ALONE] = trainees.get(APART) or Trainee(ALONE, task, peers)
    variants = [
        Variant(name, trainees[name].step, frozenset({0}) if name == ALONE else None)
        for name in names
    ]
    # The first steps make optimizer states and rebuild buckets; the last of them is the pilot.
    pilot = alternate(peers.group, variants, 3)
    lasts = [seconds[-1] for seconds in pilot.seconds.values()]
    num_calls = math.ceil(0.4 / max(lasts))
    num_rounds = num_rounds_within(settings["seconds"], num_calls * sum(lasts), at_least=3)
    samples = alternate(peers.group, variants, num_rounds, num_calls)
    plain = trainees[ECHELON].plain
    return {
        "task": settings["task"],
        "ranks": peers.size,
        "num_parameters": sum(p.numel() for p in plain.parameters()),
        "num_tensors": len(list(plain.parameters())),
        "num_calls": num_calls,
        **samples.record(),
        "same_weights": compare(trainees[ECHELON], trainees[TORCH]),
    }


def compare(ours: Trainee, theirs: Trainee) -> dict[str, float]:
    """How far the weights of two variants are apart after the same steps; fails if far."""
    assert ours.num_steps == theirs.num_steps
    difference, largest = 0.0, 0.0
    for a, b in zip(ours.plain.parameters(), theirs.plain.parameters(), strict=True):
        difference = max(difference, (a - b).abs().max().item())
        largest = max(largest, b.abs().max().item())
    if not difference <= 1e-3 * largest:
        raise AssertionError(
            f"after {ours.num_steps} steps the weights of {ECHELON} and {TORCH} differ by "
            f"{difference:.3g}, of {largest:.3g}"
        )
    return {"steps": ours.num_steps, "largest_difference": difference, "largest_weight": largest}


def memory_rank(peers: Peers, settings: dict[str, Any]) -> list[float]:
    """Peak memory of one variant in a few steps: MiB that each rank took for it."""
    name = settings["variant"]
    task = task_of(settings, peers.rank)
    peers.group.barrier()
    with PeakMemory() as peak:
        if name != ALONE or peers.rank == 0:
            trainee = Trainee(name, task, peers)
            for _ in range(4):
                trainee.step()
        peers.group.barrier()
    return peers.group.all_gather_object(peak.mib)


# --- the report --------------------------------------------------------------------------------


def table_of(result: dict[str, Any], memory: dict[str, list[float]]) -> Table:
    """A row for each variant: time of a step, what communication adds, ratios, memory."""
    everything = Samples.of(result)
    samples = everything.quiet()
    title = (
        f"{result['task']}: {result['num_parameters'] / 1e6:.1f} M parameters in "
        f"{result['num_tensors']} tensors, {result['ranks']} ranks, "
        f"{samples.num_rounds} of {everything.num_rounds} rounds, of {result['num_calls']} steps"
    )
    table = Table(title=title, box=box.MARKDOWN, title_justify="left")
    base = APART if APART in samples.seconds else ALONE
    table.add_column("variant", no_wrap=True)
    for column in (
        "ms a step",
        "added ms",
        "CPU ms a step",
        f"/ {ALONE}",
        f"/ {ECHELON}",
        "peak MiB a rank",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for name in samples.seconds:
        peak = f"{max(memory[name]):.0f}" if name in memory else ""
        row = (
            f"{samples.median_s(name) * 1e3:.1f}",
            f"{samples.difference_s(name, base) * 1e3:+.1f}",
            f"{statistics.median(samples.cpu_seconds[name]) * 1e3:.1f}",
            f"{samples.ratio(name, ALONE):.3f}",
            f"{samples.ratio(name, ECHELON):.3f}",
        )
        table.add_row(name, *row, peak)
    return table


def judged(results: Sequence[dict[str, Any]]) -> list[Outcome]:
    """What was asked, and what came out."""
    return [
        outcome
        for result in results
        for bar in BARS[result["task"]]
        for outcome in judge(bar, Samples.of(result).quiet())
    ]


def main(
    task: Annotated[list[str], typer.Option(help="What to train.")] = [GPT, MANY_SMALL],  # noqa: B006
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    layers: Annotated[int | None, typer.Option(help="Other than 8 (gpt) or 200.")] = None,
    seconds: Annotated[float, typer.Option(help="For each task.")] = 75.0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    quick: Annotated[bool, typer.Option(help="Fewer variants and rounds, no memory.")] = False,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure training steps of echelon's and PyTorch's DDP side by side."""
    if unknown := set(task) - set(BARS):
        raise typer.BadParameter(f"{sorted(unknown)}: choose from {', '.join(BARS)}")
    console = console_for_tables()
    if quick:
        seconds, memory = min(seconds, 8.0), False
    content: dict[str, Any] = {"benchmark": "ddp", "machine": machine(), "versions": versions()}
    names = [ECHELON, TORCH, ALONE] if quick else list(VARIANTS)
    settings = {"ranks": ranks, "seconds": seconds, "layers": layers, "variants": names}
    results = []
    for one in task:
        given = {**settings, "task": one}
        result = on_ranks("ddp:measure_rank", ranks, given)
        peaks = {}
        for name in (ECHELON, TORCH, ALONE) if memory else ():
            job = {**given, "variant": name}
            peaks[name] = on_ranks("ddp:memory_rank", ranks, job)
        results.append({**result, "peak_mib": peaks})
        console.print(table_of(result, peaks))
    outcomes = judged(results)
    console.print(bar_table(outcomes))
    content |= {"settings": settings, "tasks": results, "bars": [asdict(o) for o in outcomes]}
    console.print(f"All samples are in {write_json('ddp', content, output)}")


if __name__ == "__main__":
    typer.run(main)
