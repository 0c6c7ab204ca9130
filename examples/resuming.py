"""Saves a training as it goes, goes on from what was saved, and stops when it is asked to."""

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
        help="auto: go on from the newest checkpoint, on any number of ranks, if there is one",
    )


class Checkpoints:
    """Those of one training, in ``runs/NAME-checkpoints``."""

    def __init__(
        self, args: argparse.Namespace, model: Shared, optimizer: torch.optim.Optimizer
    ) -> None:
        self.folder = Path("runs") / f"{args.name}-checkpoints"
        self._args, self._model, self._optimizer = args, model, optimizer

    def resume(self) -> int:
        """Load the newest step that is whole; how many steps are done."""
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
        """A block that a signal ends after a step, if there are checkpoints to go on from."""
        return ec.StopSignals(world.group) if self._args.save_every else nullcontext()

    def after(self, step: int, stop: ec.StopSignals | None) -> None:
        """Save if it is time; save and leave if a signal has asked for it."""
        if stop is None:
            return
        state = {"model": self._model, "optimizer": self._optimizer, "keep": self._args.keep}
        if stop.requested():
            ec.save(self.folder, step=step, **state)
            sys.exit(stop.exit_code)
        if step % self._args.save_every == 0:
            ec.async_save(self.folder, step=step, **state)  # is written while training goes on
