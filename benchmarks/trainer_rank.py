"""One rank of a job that ``trainers.py`` measures: trains until its loader ends.

torchrun --nproc-per-node 2 trainer_rank.py HOST VARIANT FOLDER SETTINGS
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import torch
from models import GPTConfig, gpt_task
from trainer_turns import TurnLoader, leave

__all__ = ["main"]


def main(host: str, variant: str, folder: str, settings: str) -> None:
    """Train the GPT of ``benchmarks/ddp.py``; leave the losses of this rank in the folder."""
    torch.set_num_threads(1)
    rank, options = int(os.environ["RANK"]), json.loads(settings)
    task = gpt_task(rank, GPTConfig(layers=options["layers"]))
    loader = TurnLoader(
        folder=Path(folder), rank=rank, steps=options["steps"], batches=task.batches
    )
    losses = importlib.import_module(f"trainer_{host}").train(variant, task, loader)
    leave(Path(folder, f"losses-{rank}"), json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
