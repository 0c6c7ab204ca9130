"""Saves a training periodically, resumes it from the newest step, and stops it on request."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from wrap import Shared

import echelon as ec


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--save-every", type=int, default=0, help="steps between checkpoints; 0: none")
    add("--keep", type=int, default=2, help="checkpoints to leave")
    add(
        "--resume",
        default="never",
        choices=["never", "auto"],
        help="auto: resume from the newest checkpoint, if there is one, on any number of ranks",
    )


class Checkpoints:
    """The checkpoints of one training, in ``runs/NAME-checkpoints``."""

    def __init__(
        self, args: argparse.Namespace, model: Shared, optimizer: torch.optim.Optimizer
    ) -> None:
        self.folder = Path("runs") / f"{args.name}-checkpoints"
        self._args, self._model, self._optimizer = args, model, optimizer

    def resume(self) -> int:
        """Load the newest intact step; returns the number of steps that are done."""
        known = ec.steps(self.folder)
        if self._args.resume == "never":
            if known and self._args.save_every:  # or a step would be saved twice
                raise ec.ArgumentError(
                    f"{self.folder} holds the steps {known} of another run: go on with --resume "
                    "auto, or choose another --name"
                )
            return 0
        if not known:
            return 0
        loaded = ec.load(self.folder, model=self._model, optimizer=self._optimizer, fallback=True)
        return loaded.step

    def stopping(self, world: ec.World) -> AbstractContextManager[ec.StopSignals | None]:
        """A block that a signal ends after a step, if checkpoints are saved."""
        return ec.StopSignals(world.group) if self._args.save_every else nullcontext()

    def after(self, step: int, stop: ec.StopSignals | None) -> None:
        """Save if a save is due; save and exit if a signal has requested it."""
        if stop is None:
            return
        state = {"model": self._model, "optimizer": self._optimizer, "keep": self._args.keep}
        if stop.requested():
            ec.save(self.folder, step=step, **state)
            sys.exit(stop.exit_code)
        if step % self._args.save_every == 0:
            ec.async_save(self.folder, step=step, **state)  # written while training continues
