"""How long saving and loading take, compared with PyTorch's DCP and ``torch.save``.

    python benchmarks/checkpoint.py [--gib 0.25] [--quick]

All variants live in the same two processes and take turns. Each saves the same state, a model and
its AdamW, into a new folder on the same disk, and syncs it. Files are in the page cache when any
variant loads them. Afterwards the loaded state is compared with the saved one.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from bars import Bar, Kind, bar_table, judge
from pairs import Samples
from ranks import on_ranks
from report import console_for_tables, markdown_table, write_report
from rich.table import Table

OURS, BARE = "echelon", "echelon, no checksums"
DCP, DCP2, TORCH = "DCP", "DCP, 2 threads", "torch.save"
# Loads into an optimizer that already has its states, instead of a new one.
AGAIN, DCP_AGAIN = "echelon, in place", "DCP, in place"
HASH = "XXH3 of a GiB"
DISK = "the disk alone"  # the same number of bytes, only written and synced


def bars(task: str, technique: str) -> tuple[Bar, ...]:
    """The bars of a task."""
    name = f"{technique}, {task}"
    faster = {"save", "load", "reshard 2 to 3"}
    found = []
    if task in faster:
        found = [
            Bar(task=name, name=OURS, kind=Kind.FASTER, bound=1.5, peer=peer)
            for peer in (DCP, DCP2)
        ]
    if task == "load":
        found.append(Bar(task=name, name=AGAIN, kind=Kind.FASTER, bound=1.5, peer=DCP_AGAIN))
    if task in ("save", "load"):
        most = 1.1 if task == "save" else 1.3
        found.append(Bar(task=name, name=OURS, kind=Kind.WITHIN, bound=most, peer=BARE))
    if task == "async save":
        found.append(Bar(task=name, name=OURS, kind=Kind.WITHIN, bound=0.2, peer="echelon, whole"))
    if task == "hash":
        found.append(Bar(task=name, name=HASH, kind=Kind.SECONDS, bound=0.5))
    return tuple(found)


def main(
    gib: Annotated[float, typer.Option(help="Of model and optimizer together.")] = 0.25,
    rounds: Annotated[int, typer.Option(help="How often everything is measured.")] = 7,
    folder: Annotated[Path | None, typer.Option(help="Where to save; a new one there.")] = None,
    technique: Annotated[str, typer.Option(help="Only ddp or fsdp; both by default.")] = "",
    quick: Annotated[bool, typer.Option(help="Two rounds.")] = False,
    output: Annotated[Path | None, typer.Option(help="Of the JSON.")] = None,
) -> None:
    """Measure, print tables, and write a JSON file."""
    console = console_for_tables()
    results: dict[str, Any] = {}
    outcomes = []
    for name in [technique] if technique else ["ddp", "fsdp"]:
        with tempfile.TemporaryDirectory(prefix="echelon-bench-", dir=folder) as place:
            settings = {"gib": gib, "rounds": 2 if quick else rounds, "folder": place}
            settings |= {"technique": name}
            found = on_ranks("checkpoint_ranks:measure_saves", 2, settings)
            found |= on_ranks("checkpoint_ranks:measure_loads", 2, settings)
            found |= on_ranks("checkpoint_ranks:measure_reshard", 3, settings)
        results[name] = found
        for task, record in found.items():
            samples = Samples.of(record).quiet()
            console.print(table(f"{name}, {task}, {gib} GiB", samples))
            for bar in bars(task, name):
                outcomes += judge(bar, samples)
    console.print(bar_table(outcomes))
    path = write_report("checkpoint", outcomes, output, gib=gib, results=results)
    console.print(f"All samples are in {path}")


def table(title: str, samples: Samples) -> Table:
    """A row for each variant."""
    found = markdown_table(title, ["variant"], ["ms", "time / echelon"])
    for name in samples.seconds:
        ratio = f"{samples.ratio(name, OURS):.2f}" if OURS in samples.seconds else ""
        found.add_row(name, f"{samples.median_s(name) * 1e3:.1f}", ratio)
    return found


if __name__ == "__main__":
    typer.run(main)
