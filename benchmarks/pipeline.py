"""How long a step of a model in stages takes, compared with torch.distributed.pipelining.

    python benchmarks/pipeline.py [--quick]

All variants live in the same two processes and take turns, each with its own copy of the same
model, cut at the same places where the schedule allows. Then simulated ranks with sleeping stages
show whether a schedule takes the simulated time.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bars import Bar, Kind, Outcome, bar_table, judge
from pairs import Samples
from pipeline_ranks import GPT, LARGE, TINY, VARIANTS
from ranks import on_ranks
from report import console_for_tables, markdown_table, write_report
from rich.table import Table
from sleeping_stages import cases, measure
from variants import ALONE

import echelon as ec
from echelon.pipeline.schedules.families import FAMILIES

OURS, THEIRS = "echelon 1f1b", "PyTorch 1F1B"
OVER_GLOO = "echelon 1f1b, gloo"
SPLIT = [name for name in VARIANTS if "split" in name]
COMPARED = {
    GPT: (*VARIANTS, ALONE),
    LARGE: (OURS, OVER_GLOO, THEIRS),
    TINY: (*(name for name in VARIANTS if name not in SPLIT), ALONE),
}
TASKS = list(COMPARED)
BARS = {
    GPT: (
        Bar(task="GPT step", name=OVER_GLOO, kind=Kind.FASTER, bound=1.0, peer=THEIRS),
        Bar(task="GPT step", name=OURS, kind=Kind.FASTER, bound=1.0, peer=THEIRS),
    ),
    LARGE: (Bar(task="large activations", name=OURS, kind=Kind.FASTER, bound=1.1, peer=THEIRS),),
    TINY: (Bar(task="time of an action", name=OURS, kind=Kind.FASTER, bound=2.0, peer=THEIRS),),
}
PREDICTED, SLEEPING, PROVEN_S = 0.97, 0.05, 2.0
SIZES = {"full": ([2, 4, 8], [8, 16, 32]), "quick": ([2], [8])}


def best(samples: Samples) -> list[Outcome]:
    """Compare the fastest schedules of echelon and PyTorch."""
    ours, theirs = (
        min((n for n in samples.seconds if n.startswith(who)), key=samples.median_s)
        for who in ("echelon", "PyTorch")
    )
    bar = Bar(task="GPT step, best", name=ours, kind=Kind.FASTER, bound=1.05, peer=theirs)
    return judge(bar, samples)


def per_action(result: dict[str, Any], samples: Samples) -> Samples:
    """Time of an action beyond the model's own work, of which each rank has half."""
    own = samples.seconds[ALONE]
    count = result["num_actions"][OURS]
    return Samples(
        {
            name: [(s - a / 2) / count for s, a in zip(seconds, own, strict=True)]
            for name, seconds in samples.seconds.items()
            if name in (OURS, OVER_GLOO, THEIRS)  # which have the same actions
        }
    )


def judged(result: dict[str, Any]) -> list[Outcome]:
    """The outcomes of the bars of a task."""
    samples, task = Samples.of(result).quiet(), result["task"]
    outcomes = []
    for bar in BARS[task]:
        outcomes += judge(bar, per_action(result, samples) if task == TINY else samples)
    if task == GPT:
        outcomes += best(samples)
        share = result["predicted"][OURS]
        text = f"≥ {PREDICTED:.0%} of the speed that is simulated"
        outcomes.append(
            Outcome("GPT step, without optimizer", OURS, text, share, "×", share >= PREDICTED)
        )
    return outcomes


def table_of(result: dict[str, Any]) -> Table:
    """A row for each variant."""
    everything = Samples.of(result)
    samples = everything.quiet()
    title = (
        f"{result['task']}: {result['num_parameters'] / 1e6:.1f} M parameters, "
        f"{result['microbatches']} microbatches, 2 ranks, {samples.num_rounds} of "
        f"{everything.num_rounds} rounds, of {result['num_calls']} steps"
    )
    numbers = ("ms a step", f"{THEIRS} / it", "messages", "MiB", "MiB kept, by rank", "simulated")
    table = markdown_table(title, ["variant"], numbers)
    for name in samples.seconds:
        calls, nbytes = result["traffic"].get(name, [(0, 0)])[0]
        kept = result["saved_nbytes"].get(name, [])
        share = result["predicted"].get(name)
        table.add_row(
            name,
            f"{samples.median_s(name) * 1e3:.1f}",
            f"{samples.ratio(THEIRS, name):.3f}",
            f"{calls}",
            f"{nbytes / 2**20:.2f}",
            " ".join(f"{one / 2**20:.3g}" for one in kept),
            "" if share is None else f"{share:.1%}",
        )
    return table


def sleeping(sizes: tuple[list[int], list[int]]) -> tuple[list[dict[str, Any]], Table]:
    """Every schedule with stages that sleep, and a table of the worst of each number of ranks."""
    rows = [measure(case) for case in cases(*sizes)]
    title = "Stages that sleep, on simulated ranks: measured over simulated time of a step"
    columns = [(p, m) for p in sizes[0] for m in sizes[1]]
    table = markdown_table(title, ["schedule"], [f"p={p} m={m}" for p, m in columns])
    found = {(r["schedule"], r["ranks"], r["microbatches"]): r for r in rows}
    for name in dict.fromkeys(r["schedule"] for r in rows):
        cells = (found.get((name, p, m)) for p, m in columns)
        table.add_row(
            name, *("" if r is None else f"{r['measured_s'] / r['simulated_s']:.3f}" for r in cells)
        )
    return rows, table


def judged_sleeps(rows: Sequence[dict[str, Any]]) -> list[Outcome]:
    """The worst schedule of each number of ranks."""
    outcomes = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        own = [row for row in rows if row["ranks"] == ranks]
        worst = max(own, key=lambda row: row["measured_s"] / row["simulated_s"])
        share = worst["measured_s"] / worst["simulated_s"]
        bar = f"≤ {1 + SLEEPING:g}× the simulated time"
        task = f"sleeping stages, {ranks} ranks"
        outcomes.append(Outcome(task, worst["schedule"], bar, share, "×", share <= 1 + SLEEPING))
    return outcomes


# Every schedule, with each number of stages on a rank.
PROVEN = [
    (name, chunks)
    for name, family in FAMILIES.items()
    for chunks in ([family.chunks] if family.chunks else (1, 2, 4))
]


def proven() -> list[Outcome]:
    """Processor time of the slowest generator with ``check``, for 64 ranks and 512 microbatches."""
    seconds = {}
    for name, chunks in PROVEN:
        start_s = time.process_time()
        ec.pipeline.check(ec.pipeline.schedule(name, 64 * chunks, 512, 64))
        seconds[f"{name}, {chunks} a rank"] = time.process_time() - start_s
    worst = max(seconds, key=seconds.__getitem__)
    task = f"make and check, p = 64, m = 512, worst of {len(PROVEN)}"
    found = seconds[worst]
    return [Outcome(task, worst, f"≤ {PROVEN_S:g} s", found, "s", found <= PROVEN_S)]


def main(
    task: Annotated[list[str], typer.Option(help="What to train.")] = TASKS,
    seconds: Annotated[float, typer.Option(help="For each task.")] = 45.0,
    sleep: Annotated[bool, typer.Option(help="Run sleeping stages too.")] = True,
    quick: Annotated[bool, typer.Option(help="Fewer variants, rounds and sizes.")] = False,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure pipelines side by side, and against their simulation."""
    if unknown := set(task) - set(COMPARED):
        raise typer.BadParameter(f"{sorted(unknown)}: choose from {', '.join(COMPARED)}")
    torch.set_num_threads(1)
    console = console_for_tables()
    results, outcomes = [], list[Outcome]()
    for name in task:
        variants = (OURS, OVER_GLOO, THEIRS, ALONE) if quick else COMPARED[name]
        settings = {
            "task": name,
            "variants": list(variants),
            "seconds": min(seconds, 8.0) if quick else seconds,
            "compared": [OURS, THEIRS],
        }
        results.append(on_ranks("pipeline_ranks:measure_rank", 2, settings))
        console.print(table_of(results[-1]))
        outcomes += judged(results[-1])
    slept = []
    if sleep:
        slept, table = sleeping(SIZES["quick" if quick else "full"])
        console.print(table)
        outcomes += judged_sleeps(slept) + proven()
    console.print(bar_table(outcomes))
    settings = {"tasks": list(task), "seconds": seconds, "quick": quick}
    path = write_report(
        "pipeline", outcomes, output, settings=settings, tasks=results, sleeping=slept
    )
    console.print(f"All samples are in {path}")


if __name__ == "__main__":
    typer.run(main)
