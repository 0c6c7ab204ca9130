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
from training import ALONE, APART, GPT, MANY_SMALL, Comparison, command

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


names = (ECHELON, TORCH, ALONE)
main = command(Comparison("ddp", VARIANTS, names, weighed=names, bars=BARS))


if __name__ == "__main__":
    typer.run(main)
