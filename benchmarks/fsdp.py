"""How long a training step takes, and how much memory, when the model is sharded.

    python benchmarks/fsdp.py [--quick]

All variants live in the same two processes and take turns, each with a model and an AdamW of its
own and the same batches. Afterwards their weights are compared.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import typer
from bars import Bar, Kind
from training import ALONE, APART, GPT, LARGE_BATCH, Comparison, command

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


names = (ECHELON, TORCH, ALONE)
main = command(Comparison("fsdp", VARIANTS, names, weighed=VARIANTS[:-1], bars=BARS))


if __name__ == "__main__":
    typer.run(main)
