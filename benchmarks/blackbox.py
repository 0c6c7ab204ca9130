"""What ``ec.Blackbox`` adds to a training step of a GPT.

    python benchmarks/blackbox.py [--rounds 8] [--steps 6]

Steps with a box and steps without one take turns in the same two processes, each with a model and
an AdamW of its own. A round of the box has one checkpoint, which is written while its steps run, so
the difference of a pair is the time of a checkpoint and of keeping these steps. A checkpoint comes
every 100 steps by default, and the other steps are only kept: that is measured by itself.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import statistics
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bars import Outcome, bar_table
from models import Block, GPTConfig, Task, gpt_task
from pairs import Samples, Variant, alternate
from report import console_for_tables, write_report
from torch import nn

import echelon as ec
from echelon.laboratory.blackbox import EVERY

RANKS = 2
BOUND = 0.01  # of a step
BOXED, PLAIN = "with a box", "without"


def wrapped(name: str, plain: nn.Module, world: ec.World) -> nn.Module:
    if name == "DDP":
        return ec.DDP(plain, world.group)
    return ec.FSDP(plain, world.group, units=ec.units.by_type(Block))


class Training:
    """A model that is trained for some steps at a time.

    Args:
        folder: for a black box; None for none.
        steps: how many there are in a round, and from one checkpoint to the next.
    """

    def __init__(
        self, world: ec.World, name: str, task: Task, folder: Path | None, steps: int
    ) -> None:
        self.model = wrapped(name, task.build(), world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        self._task, self._steps = task, steps
        # Of each step without a checkpoint: time of the wall, and of the processor.
        self.kept_s: list[tuple[float, float]] = []
        self._number = 0
        batches = cycle(task.batches)
        self._batches: Iterator[Any] = enumerate(batches)
        if folder is not None:
            box = ec.Blackbox(folder, model=self.model, optimizer=self.optimizer, every=steps)
            self._batches = box.steps(batches)

    def run(self) -> None:
        """Train for some steps."""
        for i in range(self._steps):
            start_s = time.perf_counter(), time.thread_time()
            _, (inputs, targets) = next(self._batches)
            if i > 0:
                self.kept_s.append(
                    (time.perf_counter() - start_s[0], time.thread_time() - start_s[1])
                )
            self.optimizer.zero_grad()
            self._task.loss(self.model(inputs), targets).backward()
            self.optimizer.step()


def measure(
    world: ec.World, name: str, layers: int, batch: int, folder: str, rounds: int, steps: int
) -> dict[str, Any]:
    """Time rounds of both trainings; a record for the JSON file."""
    task = gpt_task(world.rank, GPTConfig(layers=layers), batch)
    boxed = Training(world, name, task, Path(folder), steps)
    plain = Training(world, name, task, None, steps)
    for training in (boxed, plain):  # the first steps make the state of the optimizer
        training.run()
        training.kept_s.clear()
    variants = [Variant(BOXED, boxed.run), Variant(PLAIN, plain.run)]
    samples = alternate(world.group, variants, rounds)
    return {**samples.record(), "kept_s": world.group.all_gather_object(boxed.kept_s)}


def costs(record: dict[str, Any], steps: int) -> dict[str, dict[str, float]]:
    """In seconds of a clock: a step, keeping one, a checkpoint; and their share of a step."""
    samples = Samples.of(record).quiet()
    found = {}
    for i, (clock, by_name) in enumerate(
        (("wall", samples.seconds), ("processor", samples.cpu_seconds))
    ):
        step_s = statistics.median(by_name[PLAIN]) / steps
        kept_s = max(statistics.median(pair[i] for pair in kept) for kept in record["kept_s"])
        pairs = zip(by_name[BOXED], by_name[PLAIN], strict=True)
        round_s = statistics.median(boxed - plain for boxed, plain in pairs)
        found[clock] = {
            "step_s": step_s,
            "kept_s": kept_s,
            "checkpoint_s": round_s - steps * kept_s,
            "share": (round_s + (EVERY - steps) * kept_s) / (EVERY * step_s),
        }
    return found


def rows(name: str, clock: str, cost: dict[str, float]) -> list[Outcome]:
    """The rows of a case in the table. Only the share of processor time is judged."""
    what = f"{name}, a step of {1e3 * cost['step_s']:.0f} ms, {clock} time"
    is_bar = clock == "processor"
    share = cost["share"]
    return [
        Outcome(what, "keeping a step", "", 1e3 * cost["kept_s"], "ms", reached=True),
        Outcome(what, "a checkpoint", "", 1e3 * cost["checkpoint_s"], "ms", reached=True),
        Outcome(
            what,
            f"both, a checkpoint every {EVERY} steps",
            f"≤ {100 * BOUND:g} % of a step" if is_bar else "",
            100 * share,
            "%",
            reached=share <= BOUND or not is_bar,
        ),
    ]


def main(
    rounds: Annotated[int, typer.Option(help="Pairs of rounds, in each case.")] = 8,
    steps: Annotated[int, typer.Option(min=2, help="Steps of a round.")] = 6,
    batch: Annotated[int, typer.Option(help="Sequences a rank.")] = 2,
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = 8,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure how much of a step a black box takes."""
    cases: list[dict[str, Any]] = []
    outcomes = []
    for name in ("DDP", "FSDP"):
        with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
            args = (name, layers, batch, folder, rounds, steps)
            record = ec.run(measure, RANKS, "processes", args=args)[0]
        by_clock = costs(record, steps)
        cases.append({"wrapper": name, "steps": steps, "batch": batch, **by_clock, **record})
        for clock, cost in by_clock.items():
            outcomes += rows(name, clock, cost)
    console = console_for_tables()
    console.print(bar_table(outcomes))
    path = write_report("blackbox", outcomes, output, cases=cases)
    console.print(f"All numbers are in {path}")


if __name__ == "__main__":
    typer.run(main)
