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
from training import GPT, LARGE_BATCH, TINY, Case, Comparison, command
from variants import ALONE, APART

ECHELON, TORCH = "echelon FSDP", "FSDP2"
SHARDED = (
    ECHELON,
    "echelon FSDP, ZeRO-2",
    TORCH,
    "FSDP2, no reshard",
    "FSDP2 over echelon",
    "FSDP1",
)
WHOLE = ("echelon DDP", "PyTorch DDP", ALONE)

CASES = {
    GPT: Case(
        variants=(*SHARDED, *WHOLE, APART),
        weighed=(*SHARDED, *WHOLE),
        bars=(
            Bar(task="GPT step", name=ECHELON, kind=Kind.WITHIN, bound=1.0, peer=ALONE),
            Bar(task="GPT step", name=ECHELON, kind=Kind.FASTER, bound=1.5, peer=TORCH),
        ),
    ),
    LARGE_BATCH: Case(
        variants=(ECHELON, TORCH, ALONE),
        bars=(
            Bar(task="GPT step, batch 8", name=ECHELON, kind=Kind.FASTER, bound=1.2, peer=TORCH),
        ),
    ),
    TINY: Case(
        variants=(*SHARDED, ALONE, APART),
        bars=(
            Bar(task="CPU of a unit and step", name=ECHELON, kind=Kind.SECONDS, bound=0.3e-3),
            Bar(task="CPU of a unit and step", name=ECHELON, kind=Kind.FASTER, bound=3, peer=TORCH),
        ),
    ),
}

main = command(Comparison("fsdp", CASES, quick=(ECHELON, TORCH, ALONE)), default_seconds=45.0)


if __name__ == "__main__":
    typer.run(main)
