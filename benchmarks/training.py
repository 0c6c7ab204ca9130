"""Training steps of several variants in the same ranks: what each takes, adds, sends and weighs.

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
from models import GPTConfig, Task, gpt_task, many_small_task, tiny_task
from pairs import Samples, Variant, alternate, num_rounds_within
from peak import PeakMemory
from peers import Peers
from ranks import on_ranks
from report import console_for_tables, machine, versions, write_json
from rich import box
from rich.table import Table
from torch import Tensor
from traffic import Traffic
from variants import ALONE, APART, WRAPPERS

import echelon as ec

__all__ = [
    "GPT",
    "LARGE_BATCH",
    "MANY_SMALL",
    "TINY",
    "Case",
    "Comparison",
    "command",
    "measure_rank",
    "memory_rank",
]

GPT, LARGE_BATCH, MANY_SMALL, TINY = "gpt", "gpt, batch 8", "many-small", "tiny"


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
        self.losses.append(self.gradients())
        self.optimizer.step()
        self.num_steps += 1

    def gradients(self) -> float:
        """What of a step the wrapper takes part in; the loss."""
        batches = self._task.batches
        inputs, targets = batches[self.num_steps % len(batches)]
        self.optimizer.zero_grad()
        loss = self._task.loss(self.model(inputs), targets)
        loss.backward()
        return loss.item()

    @property
    def sample(self) -> Callable[[], object]:
        """What is timed: a step, or without the optimizer where it is about the wrapper alone."""
        return self.step if self._task.num_units is None else self.gradients

    def traffic(self, peers: Peers) -> tuple[int, int]:
        """Collectives and bytes of the third step; the first two set up what stays."""
        self.step()
        self.step()
        with Traffic(peers.rank, peers.size) as traffic:
            self.step()
        return traffic.calls, traffic.nbytes


def task_of(settings: dict[str, Any], rank: int) -> Task:
    """What is trained, with the batches of ``rank``."""
    if settings["task"] == MANY_SMALL:
        return many_small_task(rank, layers=settings["layers"] or 200)
    if settings["task"] == TINY:
        return tiny_task(rank, blocks=settings["layers"] or 16)
    config = GPTConfig(**{"layers": settings["layers"]} if settings["layers"] else {})
    return gpt_task(rank, config, 8 if settings["task"] == LARGE_BATCH else 2)


def measure_rank(peers: Peers, settings: dict[str, Any]) -> dict[str, Any]:
    """Time all variants of one task."""
    task = task_of(settings, peers.rank)
    names = settings["variants"]
    trainees = {n: Trainee(n, task, peers) for n in names if n != ALONE}
    # Without communication it is the same thing, with the other ranks idle.
    trainees[ALONE] = trainees.get(APART) or Trainee(ALONE, task, peers)
    # The first steps make optimizer states and rebuild buckets.
    traffic = {name: trainee.traffic(peers) for name, trainee in trainees.items()}
    variants = [
        Variant(name, trainees[name].sample, frozenset({0}) if name == ALONE else None)
        for name in names
    ]
    pilot = alternate(peers.group, variants, 1)
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
        "num_units": task.num_units,
        "num_calls": num_calls,
        "traffic": traffic,
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
    """A row for each variant: time of a step, what communication adds, ratios, bytes, memory."""
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
    columns = ("ms a step", "added ms", "CPU ms", f"/ {ALONE}", f"/ {ours}", "calls", "MiB sent")
    last = "peak MiB a rank" if result["num_units"] is None else "CPU ms a unit"
    for column in (*columns, last):
        table.add_column(column, justify="right", no_wrap=True)
    units = per_unit(result)
    for name in samples.seconds:
        calls, nbytes = result["traffic"][name]
        row = (
            f"{samples.median_s(name) * 1e3:.1f}",
            f"{samples.difference_s(name, base) * 1e3:+.1f}",
            f"{statistics.median(samples.cpu_seconds[name]) * 1e3:.1f}",
            f"{samples.ratio(name, ALONE):.3f}",
            f"{samples.ratio(name, ours):.3f}",
            f"{calls}",
            f"{nbytes / 2**20:.1f}",
        )
        peak = f"{max(memory[name]):.0f}" if name in memory else ""
        if name in units.seconds:
            peak = f"{units.median_s(name) * 1e3:.3f}"
        table.add_row(name, *row, peak)
    return table


def per_unit(result: dict[str, Any]) -> Samples:
    """Processor time of a step beyond that of the plain model, for each unit, as seconds."""
    if result["num_units"] is None:
        return Samples({})
    cpu = Samples.of(result).quiet().cpu_seconds
    return Samples(
        {
            name: [
                (s - p) / result["num_units"] for s, p in zip(cpu[name], cpu[ALONE], strict=True)
            ]
            for name in cpu
            if name not in (ALONE, APART)
        }
    )


def judged(results: Sequence[dict[str, Any]], cases: Mapping[str, Case]) -> list[Outcome]:
    """What was asked of each task, and what came out."""
    return [
        outcome
        for result in results
        for bar in cases[result["task"]].bars
        for outcome in judge(
            bar, Samples.of(result).quiet() if result["num_units"] is None else per_unit(result)
        )
    ]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is compared on one task.

    Attributes:
        variants: all of them; the first is what the others are compared with.
        weighed: those whose peak memory is measured.
        bars: what must be reached.
    """

    variants: Sequence[str]
    weighed: Sequence[str] = ()
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Comparison:
    """What one benchmark compares.

    Attributes:
        name: of the JSON file.
        cases: by task.
        quick: the variants of a quick run; the weights of its first two must agree.
    """

    name: str
    cases: Mapping[str, Case]
    quick: Sequence[str]


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
    if unknown := set(tasks) - set(comparison.cases):
        raise typer.BadParameter(f"{sorted(unknown)}: choose from {', '.join(comparison.cases)}")
    console = console_for_tables()
    if quick:
        seconds, memory = min(seconds, 8.0), False
    facts = {"benchmark": comparison.name, "machine": machine(), "versions": versions()}
    settings = {
        "ranks": ranks,
        "seconds": seconds,
        "layers": layers,
        "compared": list(comparison.quick[:2]),
    }
    results = []
    for task in tasks:
        case = comparison.cases[task]
        variants = comparison.quick if quick else case.variants
        given = {**settings, "task": task, "variants": list(variants)}
        result = on_ranks("training:measure_rank", ranks, given)
        peaks = {
            name: on_ranks("training:memory_rank", ranks, {**given, "variant": name})
            for name in (case.weighed if memory else ())
        }
        results.append({**result, "peak_mib": peaks})
        console.print(table_of(result, peaks))
    outcomes = judged(results, comparison.cases)
    console.print(bar_table(outcomes))
    content: dict[str, Any] = {**facts, "settings": settings, "tasks": results}
    content["bars"] = [asdict(outcome) for outcome in outcomes]
    console.print(f"All samples are in {write_json(comparison.name, content, output)}")


def command(comparison: Comparison, default_seconds: float = 75.0) -> Callable[..., None]:
    """The command line of a comparison."""
    tasks = list(comparison.cases)

    def main(
        task: Annotated[list[str], typer.Option(help="What to train.")] = tasks,
        ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
        layers: Annotated[int | None, typer.Option(help="Other than the task has.")] = None,
        seconds: Annotated[float, typer.Option(help="For each task.")] = default_seconds,
        memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
        quick: Annotated[bool, typer.Option(help="Fewer variants and rounds, no memory.")] = False,
        output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
    ) -> None:
        """Measure training steps of all variants side by side."""
        run(comparison, task, ranks, layers, seconds, quick=quick, memory=memory, output=output)

    return main
