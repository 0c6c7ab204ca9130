"""How long a training step takes with echelon's DDP, PyTorch's DDP and no communication.

    python benchmarks/ddp.py [--quick]

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
from training import ALONE, APART, GPT, MANY_SMALL, Comparison, run

ECHELON, TORCH, STATIC = "echelon DDP", "PyTorch DDP", "PyTorch DDP, static graph"
VARIANTS = (ECHELON, TORCH, STATIC, ALONE, APART)

BARS = {
    GPT: (
        Bar(task="GPT step", name=ECHELON, kind=Kind.WITHIN, bound=1.06, peer=ALONE),
        Bar(task="GPT step", name=ECHELON, kind=Kind.FASTER, bound=1.08, peer=TORCH),
    ),
    MANY_SMALL: (
        Bar(task="many small step", name=ECHELON, kind=Kind.FASTER, bound=1.5, peer=TORCH),
    ),
}


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
    names = (ECHELON, TORCH, ALONE)
    comparison = Comparison("ddp", VARIANTS, names, weighed=names, bars=BARS)
    run(comparison, task, ranks, layers, seconds, quick=quick, memory=memory, output=output)


if __name__ == "__main__":
    typer.run(main)
