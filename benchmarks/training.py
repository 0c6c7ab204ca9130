"""Training steps of several variants in the same ranks: what each takes, adds and weighs.

A variant is a name in ``WRAPPERS``, which says what is put around the model.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bars import Bar, Outcome, bar_table, judge
from models import Block, GPTConfig, Task, gpt_task, many_small_task
from pairs import Samples, Variant, alternate, num_rounds_within
from peak import PeakMemory
from peers import Peers
from ranks import on_ranks
from report import console_for_tables, machine, versions, write_json
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import echelon as ec

__all__ = [
    "ALONE",
    "APART",
    "GPT",
    "LARGE_BATCH",
    "MANY_SMALL",
    "WRAPPERS",
    "Comparison",
    "command",
    "measure_rank",
    "memory_rank",
]

ALONE, APART = "one process alone", "all ranks, no communication"
GPT, LARGE_BATCH, MANY_SMALL = "gpt", "gpt, batch 8", "many-small"


def sharded(model: nn.Module, peers: Peers, strategy: ec.Strategy) -> nn.Module:
    """echelon's FSDP with one unit for each block."""
    return ec.FSDP(model, peers.group, units=ec.units.by_type(Block), strategy=strategy)


def fully_sharded(model: nn.Module, *, reshard: bool) -> nn.Module:
    """PyTorch's FSDP2 with one unit for each block."""
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, reshard_after_forward=reshard)
    fully_shard(model, reshard_after_forward=reshard)
    return model


# With the settings that make each fastest.
WRAPPERS: dict[str, Callable[[nn.Module, Peers], nn.Module]] = {
    "echelon DDP": lambda model, peers: ec.DDP(model, peers.group),
    "PyTorch DDP": lambda model, peers: DistributedDataParallel(
        model, gradient_as_bucket_view=True
    ),
    "PyTorch DDP, static graph": lambda model, peers: DistributedDataParallel(
        model, gradient_as_bucket_view=True, static_graph=True
    ),
    "echelon FSDP": lambda model, peers: sharded(model, peers, ec.Strategy.FULL_SHARD),
    "echelon FSDP, ZeRO-2": lambda model, peers: sharded(model, peers, ec.Strategy.SHARD_GRAD_OP),
    "FSDP2": lambda model, peers: fully_sharded(model, reshard=True),
    "FSDP2, no reshard": lambda model, peers: fully_sharded(model, reshard=False),
    ALONE: lambda model, peers: model,
    APART: lambda model, peers: model,
}


# --- on a rank ---------------------------------------------------------------------------------


class Trainee:
    """One model with its optimizer, trained one batch at a time.

    Args:
        name: of the variant, which decides the wrapper.
    """

    def __init__(self, name: str, task: Task, peers: Peers) -> None:
        self.name = name
        self.plain = task.build()
        self.model = WRAPPERS[name](self.plain, peers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
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


def task_of(settings: dict[str, Any], rank: int) -> Task:
    """What is trained, with the batches of ``rank``."""
    if settings["task"] == MANY_SMALL:
        return many_small_task(rank, layers=settings["layers"] or 200)
    config = GPTConfig(**{"layers": settings["layers"]} if settings["layers"] else {})
    return gpt_task(rank, config, 8 if settings["task"] == LARGE_BATCH else 2)


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
    ours, theirs = (trainees[name] for name in settings["compared"])
    plain = task.build()
    return {
        "task": settings["task"],
        "ranks": peers.size,
        "num_parameters": sum(p.numel() for p in plain.parameters()),
        "num_tensors": len(list(plain.parameters())),
        "num_calls": num_calls,
        **samples.record(),
        "ours": settings["compared"][0],
        "same_weights": compare(ours, theirs),
    }


def compare(ours: Trainee, theirs: Trainee) -> dict[str, float]:
    """How far the weights of two variants are apart after the same steps; fails if far."""
    assert ours.num_steps == theirs.num_steps
    difference, largest = 0.0, 0.0
    expected = weights_of(theirs)
    for name, a in weights_of(ours).items():
        difference = max(difference, (a - expected[name]).abs().max().item())
        largest = max(largest, expected[name].abs().max().item())
    if not difference <= 1e-3 * largest:
        raise AssertionError(
            f"after {ours.num_steps} steps the weights of {ours.name} and {theirs.name} differ by "
            f"{difference:.3g}, of {largest:.3g}"
        )
    return {"steps": ours.num_steps, "largest_difference": difference, "largest_weight": largest}


def weights_of(trainee: Trainee) -> dict[str, Tensor]:
    """The whole weights by plain name. All ranks call it."""
    if isinstance(trainee.model, ec.FSDP):
        return dict(trainee.model.state_dict())
    return {
        name: param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
        for name, param in trainee.plain.named_parameters()
    }


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
    everything, ours = Samples.of(result), result["ours"]
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
        f"/ {ours}",
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
            f"{samples.ratio(name, ours):.3f}",
        )
        table.add_row(name, *row, peak)
    return table


def judged(results: Sequence[dict[str, Any]], bars: Mapping[str, Sequence[Bar]]) -> list[Outcome]:
    """What was asked of each task, and what came out."""
    return [
        outcome
        for result in results
        for bar in bars[result["task"]]
        for outcome in judge(bar, Samples.of(result).quiet())
    ]


@dataclass(frozen=True)
class Comparison:
    """What one benchmark compares.

    Attributes:
        name: of the JSON file.
        variants: all of them; the first is what the others are compared with.
        quick: those of a quick run; the weights of its first two must agree.
        weighed: those whose peak memory is measured.
        bars: of each task.
    """

    name: str
    variants: Sequence[str]
    quick: Sequence[str]
    weighed: Sequence[str]
    bars: Mapping[str, Sequence[Bar]]


def run(
    comparison: Comparison,
    tasks: Sequence[str],
    ranks: int,
    layers: int | None,
    seconds: float,
    *,
    quick: bool,
    memory: bool,
    output: Path | None,
) -> None:
    """Measure every task, print tables, write the JSON file."""
    if unknown := set(tasks) - set(comparison.bars):
        raise typer.BadParameter(f"{sorted(unknown)}: choose from {', '.join(comparison.bars)}")
    console = console_for_tables()
    if quick:
        seconds, memory = min(seconds, 8.0), False
    facts = {"benchmark": comparison.name, "machine": machine(), "versions": versions()}
    settings = {
        "ranks": ranks,
        "seconds": seconds,
        "layers": layers,
        "variants": list(comparison.quick if quick else comparison.variants),
        "compared": list(comparison.quick[:2]),
    }
    results = []
    for task in tasks:
        given = {**settings, "task": task}
        result = on_ranks("training:measure_rank", ranks, given)
        peaks = {
            name: on_ranks("training:memory_rank", ranks, {**given, "variant": name})
            for name in (comparison.weighed if memory else ())
        }
        results.append({**result, "peak_mib": peaks})
        console.print(table_of(result, peaks))
    outcomes = judged(results, comparison.bars)
    console.print(bar_table(outcomes))
    content: dict[str, Any] = {**facts, "settings": settings, "tasks": results}
    content["bars"] = [asdict(outcome) for outcome in outcomes]
    console.print(f"All samples are in {write_json(comparison.name, content, output)}")


def command(comparison: Comparison) -> Callable[..., None]:
    """The command line of a comparison."""
    tasks = list(comparison.bars)

    def main(
        task: Annotated[list[str], typer.Option(help="What to train.")] = tasks,
        ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
        layers: Annotated[int | None, typer.Option(help="Other than 8 (gpt) or 200.")] = None,
        seconds: Annotated[float, typer.Option(help="For each task.")] = 75.0,
        memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
        quick: Annotated[bool, typer.Option(help="Fewer variants and rounds, no memory.")] = False,
        output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
    ) -> None:
        """Measure training steps of all variants side by side."""
        run(comparison, task, ranks, layers, seconds, quick=quick, memory=memory, output=output)

    return main
