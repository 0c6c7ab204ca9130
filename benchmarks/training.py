"""Training steps of several variants in the same ranks: time, traffic and memory of each.

A variant is a name in ``WRAPPERS``, which says what is put around the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from bars import Bar, Outcome, bar_table, judge
from memory import PeakMemory
from models import GPTConfig, Task, gpt_task, many_small_task, tiny_task
from pairs import Samples, Variant, alternate_within
from peers import Peers
from ranks import on_ranks
from report import console_for_tables, markdown_table, write_report
from rich.table import Table
from torch import Tensor
from trainee import Trainee, compare_weights
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


class WrappedModel(Trainee):
    """A model in the wrapper of a variant, trained one batch at a time.

    Args:
        name: of the variant, which decides the wrapper.
    """

    def __init__(self, name: str, task: Task, peers: Peers) -> None:
        self.plain = task.build()
        super().__init__(name, WRAPPERS[name](self.plain, peers))
        self._task = task
        self.losses: list[float] = []

    def gradients(self) -> None:
        """Run the part of a step in which the wrapper takes part."""
        batches = self._task.batches
        inputs, targets = batches[self.num_steps % len(batches)]
        self.optimizer.zero_grad()
        loss = self._task.loss(self.model(inputs), targets)
        loss.backward()
        self.losses.append(loss.item())

    @property
    def sample(self) -> Callable[[], object]:
        """What is timed: a step, or its gradients where only the wrapper counts."""
        return self.step if self._task.num_units is None else self.gradients

    def weights(self) -> dict[str, Tensor]:
        """The full weights by plain name. All ranks call it."""
        if isinstance(self.model, ec.FSDP):
            return dict(self.model.state_dict())
        return {
            name: param.full_tensor() if hasattr(param, "full_tensor") else param.detach()
            for name, param in self.plain.named_parameters()
        }


def task_of(settings: dict[str, Any], rank: int) -> Task:
    """The task of the settings, with the batches of ``rank``."""
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
    trainees = {n: WrappedModel(n, task, peers) for n in names if n != ALONE}
    # The same model as without communication, while the other ranks are idle.
    trainees[ALONE] = trainees.get(APART) or WrappedModel(ALONE, task, peers)
    # The first steps make optimizer states and rebuild buckets.
    traffic = {name: trainee.traffic(peers) for name, trainee in trainees.items()}
    variants = [
        Variant(name, trainees[name].sample, frozenset({0}) if name == ALONE else None)
        for name in names
    ]
    num_calls, samples = alternate_within(peers.group, variants, settings["seconds"], sample_s=0.4)
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
        "same_weights": compare_weights(ours, theirs, ours.weights(), theirs.weights()),
    }


def memory_rank(peers: Peers, settings: dict[str, Any]) -> list[float]:
    """Peak memory of one variant in a few steps, in MiB by rank."""
    name = settings["variant"]
    task = task_of(settings, peers.rank)
    peers.group.barrier()
    with PeakMemory() as peak:
        if name != ALONE or peers.rank == 0:
            trainee = WrappedModel(name, task, peers)
            for _ in range(4):
                trainee.step()
        peers.group.barrier()
    return peers.group.all_gather_object(peak.mib)


# --- the report --------------------------------------------------------------------------------


def table_of(result: dict[str, Any], memory: dict[str, list[float]]) -> Table:
    """A row for each variant: time of a step and of communication, ratios, bytes, memory."""
    everything, ours = Samples.of(result), result["ours"]
    samples = everything.quiet()
    title = (
        f"{result['task']}: {result['num_parameters'] / 1e6:.1f} M parameters in "
        f"{result['num_tensors']} tensors, {result['ranks']} ranks, "
        f"{samples.num_rounds} of {everything.num_rounds} rounds, of {result['num_calls']} steps"
    )
    base = APART if APART in samples.seconds else ALONE
    columns = ("ms a step", "added ms", "CPU ms", f"/ {ALONE}", f"/ {ours}", "calls", "MiB sent")
    last = "peak MiB a rank" if result["num_units"] is None else "CPU ms a unit"
    table = markdown_table(title, ["variant"], [*columns, last])
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
    """The outcomes of all bars of all tasks."""
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
    """The comparison on one task.

    Attributes:
        variants: all variants; the others are compared with the first one.
        weighed: variants whose peak memory is measured.
        bars: performance bars.
    """

    variants: Sequence[str]
    weighed: Sequence[str] = ()
    bars: Sequence[Bar]


@dataclass(frozen=True)
class Comparison:
    """All comparisons of one benchmark.

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
    path = write_report(comparison.name, outcomes, output, settings=settings, tasks=results)
    console.print(f"All samples are in {path}")


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
