"""How long a training step takes with echelon's DDP, PyTorch's DDP and no communication.

    python benchmarks/ddp.py [--quick]

All variants live in the same two processes and take turns, each with a model and an AdamW of its
own and the same batches. Afterwards their weights are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import typer
from bars import Bar, Kind
from training import GPT, MANY_SMALL, Case, Comparison, command
from variants import ALONE, APART

ECHELON, TORCH, STATIC = "echelon DDP", "PyTorch DDP", "PyTorch DDP, static graph"
VARIANTS = (ECHELON, TORCH, STATIC, ALONE, APART)

WEIGHED = (ECHELON, TORCH, ALONE)

CASES = {
    GPT: Case(
        variants=VARIANTS,
        weighed=WEIGHED,
        bars=(
            Bar(task="GPT step", name=ECHELON, kind=Kind.WITHIN, bound=1.06, peer=ALONE),
            Bar(task="GPT step", name=ECHELON, kind=Kind.FASTER, bound=1.08, peer=TORCH),
        ),
    ),
    MANY_SMALL: Case(
        variants=VARIANTS,
        weighed=WEIGHED,
        bars=(Bar(task="many small step", name=ECHELON, kind=Kind.FASTER, bound=1.5, peer=TORCH),),
    ),
}


main = command(Comparison("ddp", CASES, quick=(ECHELON, TORCH, ALONE)))


if __name__ == "__main__":
    typer.run(main)
