"""Compares the times of two ranks with this tree's sources and with those of another tree.

    git worktree add /tmp/before REVISION
    python benchmarks/against.py /tmp/before [--world processes] [--rounds 8] [--only fsdp]

The trees alternate. Every turn starts two ranks and times all workloads of ``WORKLOADS``; the
medians of two turns that follow each other are compared. Losses, and FSDP's peaks of unsharded
parameters and of gradients, do not depend on the machine, and are compared too.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from models import UNITS, Block, GPTConfig, Task, gpt_task, many_small_task, tiny_task
from torch import nn

import echelon as ec

HERE = Path(__file__).resolve().parent
WARM_UP = 3  # calls that make optimizer states and record orders
RANKS = 2

Times = dict[str, float]  # seconds of one call by workload; "cpu" is processor time
Facts = dict[str, Any]


class WorldKind(StrEnum):
    """Where the ranks live."""

    PROCESSES = "processes"
    THREADS = "threads"
    GLOO = "gloo"


class Timing(NamedTuple):
    """A call to time: ``num_samples`` samples that begin at a barrier, of ``num_calls`` calls each.

    ``run`` returns the medians over the samples.
    """

    what: str
    call: Callable[[], object]
    num_samples: int
    num_calls: int = 1

    def run(self, group: ec.Group) -> Times:
        seconds, cpu = [], []
        for _ in range(WARM_UP):
            self.call()
        for _ in range(self.num_samples):
            group.barrier()
            start, start_cpu = time.perf_counter(), time.thread_time()
            for _ in range(self.num_calls):
                self.call()
            seconds.append((time.perf_counter() - start) / self.num_calls)
            cpu.append((time.thread_time() - start_cpu) / self.num_calls)
        return {
            self.what: statistics.median(seconds),
            f"{self.what} (processor)": statistics.median(cpu),
        }


# What a workload yields: a call to time, or results that do not depend on the machine.
Item = Timing | tuple[str, Facts]


def collectives(group: ec.Group) -> Iterator[Item]:
    """Every operation with 1 KiB, and those of large tensors with 4 MiB."""
    for name, call in operations(group, 1 << 10).items():
        yield Timing(f"{name}, 1 KiB", call, 25, 40)
    for name, call in operations(group, 1 << 22).items():
        if name not in ("reduce", "gather", "scatter", "barrier"):
            yield Timing(f"{name}, 4 MiB", call, 15, 4)


def operations(group: ec.Group, nbytes: int) -> dict[str, Callable[[], object]]:
    """The operations of two ranks, on tensors of ``nbytes``."""
    other, numel = 1 - group.rank, nbytes // 4
    whole, target, part = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel // RANKS)
    parts = None if group.rank else [torch.zeros(numel // RANKS) for _ in range(RANKS)]

    def send_and_receive() -> None:
        for sender in range(RANKS):
            (group.send if group.rank == sender else group.recv)(whole, other)

    return {
        "all_reduce": lambda: group.all_reduce(whole),
        "reduce_scatter_single": lambda: group.reduce_scatter_single(part, whole),
        "all_gather_single": lambda: group.all_gather_single(whole, part),
        "all_to_all_single": lambda: group.all_to_all_single(target, whole),
        "broadcast": lambda: group.broadcast(whole, 0),
        "reduce": lambda: group.reduce(whole, 0),
        "gather": lambda: group.gather(part, parts, 0),
        "scatter": lambda: group.scatter(part, parts, 0),
        "barrier": group.barrier,
        "send and recv": send_and_receive,
    }


def step_of(task: Task, model: nn.Module) -> Callable[[], float]:
    """A step of an ordinary training loop; it returns its loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    inputs, targets = task.batches[0]

    def step() -> float:
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def ddp(group: ec.Group) -> Iterator[Item]:
    """Steps of the GPT and of many small layers, the model replicated."""
    for task, num_samples in (
        (gpt_task(group.rank, GPTConfig()), 5),
        (many_small_task(group.rank), 12),
    ):
        step = step_of(task, ec.DDP(task.build(), group))
        yield Timing(f"DDP, {task.name}", step, num_samples)
        yield f"DDP, {task.name}", {"loss": step()}


def fsdp(group: ec.Group) -> Iterator[Item]:
    """Steps of the GPT, and of units with almost no work, the model sharded."""
    for task, num_samples in ((gpt_task(group.rank, GPTConfig()), 8), (tiny_task(group.rank), 60)):
        rule = ec.units.by_type(*UNITS)
        model = ec.FSDP(task.build(), group, units=rule, min_num_params=0)
        step = step_of(task, model)
        yield Timing(f"FSDP, {task.name}", step, num_samples)
        stats = model.memory_stats()
        peaks = [stats.peak_gathered, stats.peak_gradients]
        yield f"FSDP, {task.name}", {"loss": step(), "peak bytes": peaks}


def pipeline(group: ec.Group) -> Iterator[Item]:
    """Steps of the GPT's blocks and of tiny ones in stages, under 1F1B and ZB-V."""
    gpt = gpt_task(0, GPTConfig(), batch=4)
    for name, num_stages in (("1f1b", 2), ("zb-v", 4)):
        for task, num_samples in ((gpt, 4), (tiny_task(0, 4), 40)):
            layers = list(task.build().modules() if task is gpt else task.build())
            if task is gpt:
                layers = [m for m in layers if isinstance(m, (nn.Embedding, Block, nn.Linear))]
                layers = [layers[0], *(m for m in layers if isinstance(m, Block)), layers[-1]]
            cuts = [len(layers) * i // num_stages for i in range(num_stages + 1)]
            stages = [nn.Sequential(*layers[a:b]) for a, b in pairwise(cuts)]
            inputs, targets = task.batches[0]
            pipe = ec.Pipeline(stages, group, microbatches=4, schedule=name, loss_fn=task.loss)
            step = pipeline_step(pipe, inputs, targets)
            what = f"pipeline, {name}, {task.name}"
            yield Timing(what, step, num_samples)
            yield what, {"loss": step()}


def pipeline_step(
    pipe: ec.Pipeline, inputs: torch.Tensor, targets: torch.Tensor
) -> Callable[[], float | None]:
    """A step of the stages of this rank; it returns the loss, where this rank has it."""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-4, foreach=True)

    def step() -> float | None:
        optimizer.zero_grad()
        loss = pipe.step(inputs, target=targets)
        optimizer.step()
        return loss.item() if isinstance(loss, torch.Tensor) else None

    return step


def checkpoint(group: ec.Group) -> Iterator[Item]:
    """Saves and loads of the GPT under FSDP with AdamW's states, 405 MB together."""
    task = gpt_task(group.rank, GPTConfig())
    model = ec.FSDP(task.build(), group, units=ec.units.by_type(*UNITS), min_num_params=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    inputs, targets = task.batches[0]
    task.loss(model(inputs), targets).backward()
    optimizer.step()
    folder = group.broadcast_object(tempfile.mkdtemp() if group.rank == 0 else None)
    steps = count()

    def save() -> None:
        ec.save(folder, step=next(steps), model=model, optimizer=optimizer, group=group, keep=2)

    def load() -> None:
        ec.load(folder, model=model, optimizer=optimizer, group=group)

    yield Timing("checkpoint, save", save, 4)
    yield Timing("checkpoint, load", load, 4)
    group.barrier()
    if group.rank == 0:
        shutil.rmtree(folder)


WORKLOADS = {f.__name__: f for f in (collectives, ddp, fsdp, pipeline, checkpoint)}


def measure(world: ec.World, names: list[str], quick: bool = False) -> dict[str, Any]:
    """On a rank: the times and facts of these workloads; with ``quick``, of one call each."""
    torch.set_num_threads(1)
    times: Times = {}
    facts: Facts = {}
    for name in names:
        for item in WORKLOADS[name](world.group):
            if isinstance(item, Timing):
                timing = item._replace(num_samples=1, num_calls=1) if quick else item
                times |= timing.run(world.group)
            else:
                what, results = item
                facts |= {f"{what}: {key}": value for key, value in results.items()}
    return {"times": times, "facts": facts}


def turn(tree: Path, world: WorldKind, names: list[str], quick: bool) -> dict[str, Any]:
    """What two ranks measure with the sources of ``tree``, in processes of their own."""
    command = [sys.executable]
    if world is WorldKind.GLOO:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [str(HERE / "against.py"), str(tree), "--world", world, "--only", ",".join(names)]
    command += ["--quick"] if quick else []
    path = os.pathsep.join((str(tree / "src"), str(HERE)))
    done = subprocess.run(
        [*command, "--one-turn"],
        env={**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure_turn(tree: Path, world: WorldKind, names: list[str], quick: bool) -> None:
    """Start the ranks, or join them, and print what rank 0 measures."""
    assert Path(ec.__file__).is_relative_to(tree), (ec.__file__, tree)
    if world is not WorldKind.GLOO:
        results = ec.run(measure, RANKS, world.value, args=(names, quick))
        print(json.dumps(results[0]), flush=True)
        return
    with ec.init("gloo") as joined:
        result = measure(joined, names, quick)
        if joined.rank == 0:
            print(json.dumps(result), flush=True)


def main(
    other: Annotated[Path, typer.Argument(help="A checkout of another revision.")],
    world: Annotated[WorldKind, typer.Option(help="Where the ranks live.")] = WorldKind.PROCESSES,
    rounds: Annotated[int, typer.Option(help="Pairs of turns.")] = 8,
    only: Annotated[str, typer.Option(help="Workloads, with commas.")] = ",".join(WORKLOADS),
    quick: Annotated[bool, typer.Option("--quick", help="One call of each: to try it.")] = False,
    one_turn: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Compare this tree with another one."""
    names = only.split(",")
    if unknown := set(names) - WORKLOADS.keys():
        raise typer.BadParameter(f"{sorted(unknown)}; there are {', '.join(WORKLOADS)}")
    if one_turn:
        measure_turn(other, world, names, quick)
        return
    pairs = []
    for number in range(rounds):
        turns = [
            partial(turn, tree, world, names, quick) for tree in (HERE.parent, other.resolve())
        ]
        results = [run() for run in (turns if number % 2 == 0 else reversed(turns))]
        pairs.append(results if number % 2 == 0 else results[::-1])
        print(f"pair {number + 1} of {rounds}", flush=True)
    show(pairs)


def show(pairs: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Print the times of both trees and their ratios, and whether the facts are the same."""
    print(f"{'':44} {'this, ms':>10} {'other, ms':>10}  other / this: median (of the fastest)")
    facts = pairs[0][0]["facts"]
    for what in pairs[0][0]["times"]:
        times = [[result["times"][what] * 1e3 for result in pair] for pair in pairs]
        this, other = zip(*times, strict=True)
        ratio = statistics.median(b / a for a, b in times)
        print(
            f"{what:44} {statistics.median(this):10.4f} {statistics.median(other):10.4f}"
            f"  {ratio:.3f} ({min(other) / min(this):.3f})"
        )
    for what, value in facts.items():
        same = all(result["facts"][what] == value for pair in pairs for result in pair)
        print(f"{what}: {value}, {'the same' if same else 'NOT the same'} in all turns")


if __name__ == "__main__":
    typer.run(main)
