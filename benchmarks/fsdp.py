"""How long a training step takes, and how much memory, when the model is sharded.

    python benchmarks/fsdp.py [--quick]

All variants live in the same two processes and take turns, each with a model and an AdamW of its
own and the same batches. Afterwards their weights are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

from pathlib import Path
from typing import Annotated

import typer
from bars import Bar, Kind
from training import ALONE, APART, GPT, LARGE_BATCH, Comparison, run

ECHELON, TORCH = "echelon FSDP", "FSDP2"
VARIANTS = (
    ECHELON,
    "echelon FSDP, ZeRO-2",
    TORCH,
    "FSDP2, no reshard",
    "echelon DDP",
    "PyTorch DDP",
    ALONE,
    APART,
)

BARS = {
    GPT: (
        Bar(task="GPT step", name=ECHELON, kind=Kind.WITHIN, bound=1.0, peer=ALONE),
        Bar(task="GPT step", name=ECHELON, kind=Kind.FASTER, bound=1.5, peer=TORCH),
    ),
    LARGE_BATCH: (
        Bar(task="GPT step, batch 8", name=ECHELON, kind=Kind.FASTER, bound=1.2, peer=TORCH),
    ),
}


def main(
    task: Annotated[list[str], typer.Option(help="What to train.")] = [GPT, LARGE_BATCH],  # noqa: B006
    ranks: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    layers: Annotated[int | None, typer.Option(help="Other than 8.")] = None,
    seconds: Annotated[float, typer.Option(help="For each task.")] = 75.0,
    memory: Annotated[bool, typer.Option(help="Measure peak memory too.")] = True,
    quick: Annotated[bool, typer.Option(help="Fewer variants and rounds, no memory.")] = False,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure sharded training steps of echelon and PyTorch side by side."""
    names = (ECHELON, TORCH, ALONE)
    comparison = Comparison("fsdp", VARIANTS, names, weighed=VARIANTS[:-1], bars=BARS)
    run(comparison, task, ranks, layers, seconds, quick=quick, memory=memory, output=output)


if __name__ == "__main__":
    typer.run(main)
