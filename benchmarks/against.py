"""Compares the times of two ranks with this tree's sources and with those of another tree.

    git worktree add /tmp/before REVISION
    python benchmarks/against.py /tmp/before [--world processes] [--rounds 4] [--only fsdp]

Both trees have two ranks that live at the same time and take turns, sample by sample: one tree
works, and the ranks of the other one sleep. So the two samples of a pair are at most seconds apart,
and see the same clock and the same neighbours of the machine. In every round all ranks start anew,
and another tree is the first to start: give an even number of rounds.
Losses, and FSDP's peaks of unsharded parameters and of gradients, do not depend on the machine, and
are compared too.

Processes compute at the same time, and a sample is what rank 0 takes. Simulated ranks compute one
after the other, so a sample is what all of them take together, with the turns that they hand on.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import json
import math
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from itertools import chain, count, pairwise
from multiprocessing.connection import wait
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TextIO

import torch
import typer
from models import UNITS, Block, GPTConfig, Task, gpt_task, many_small_task, tiny_task
from torch import nn

import echelon as ec

HERE = Path(__file__).resolve().parent
WARM_UP = 3  # calls that make optimizer states and record orders
RANKS = 2
PATIENCE_S = 300.0  # for a start or one sample of a job
# glibc gives freed memory back, or not, by what a process has asked for before. Its pages are then
# mapped anew, which costs a gather of all units between 8,000 and 24,000 faults from one start to
# the next. So all memory is of the heap, which keeps it.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

Times = dict[str, float]  # seconds of one call by workload; "cpu" is processor time
Facts = dict[str, Any]


class WorldKind(StrEnum):
    """Where the ranks live."""

    PROCESSES = "processes"
    THREADS = "threads"
    GLOO = "gloo"


class Timing(NamedTuple):
    """A call to time: ``num_samples`` samples, each of ``num_calls`` calls after a barrier."""

    what: str
    call: Callable[[], object]
    num_samples: int
    num_calls: int = 1

    def sample(self, world: ec.World) -> Times:
        """One sample, in seconds of one call: of this rank, or of all ranks if they take turns."""
        takes_turns = world.backend == WorldKind.THREADS
        processor_s = time.process_time if takes_turns else time.thread_time
        start, start_cpu = time.perf_counter(), processor_s()
        if takes_turns:
            world.group.barrier()  # before which no rank begins
        for _ in range(self.num_calls):
            self.call()
        if takes_turns:
            world.group.barrier()  # behind which all have ended
        seconds, cpu = time.perf_counter() - start, processor_s() - start_cpu
        return {
            self.what: seconds / self.num_calls,
            f"{self.what} (processor)": cpu / self.num_calls,
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
        (many_small_task(group.rank), 24),
    ):
        step = step_of(task, ec.DDP(task.build(), group))
        yield Timing(f"DDP, {task.name}", step, num_samples)
        yield f"DDP, {task.name}", {"loss": step()}


def fsdp(group: ec.Group) -> Iterator[Item]:
    """Steps and gathers of the GPT, and of units with almost no work, the model sharded."""
    gpt, tiny = gpt_task(group.rank, GPTConfig()), tiny_task(group.rank)
    for task, num_samples, num_calls in ((gpt, 8, 1), (tiny, 60, 2)):
        rule = ec.units.by_type(*UNITS)
        model = ec.FSDP(task.build(), group, units=rule, min_num_params=0)
        step = step_of(task, model)
        yield Timing(f"FSDP, {task.name}", step, num_samples, num_calls)
        stats = model.memory_stats()
        peaks = [stats.peak_gathered, stats.peak_gradients]
        yield f"FSDP, {task.name}", {"loss": step(), "peak bytes": peaks}
        unshard = partial(unshard_all, model)
        yield Timing(f"FSDP, {task.name}, unshard", unshard, num_samples, 4)


def unshard_all(model: ec.FSDP) -> None:
    """Gather all units at once, and give their memory back."""
    with model.full_parameters():
        pass


def pipeline(group: ec.Group) -> Iterator[Item]:
    """Steps of the GPT's blocks and of tiny ones in stages, under 1F1B and ZB-V."""
    gpt = gpt_task(0, GPTConfig(), batch=4)
    for name, num_stages in (("1f1b", 2), ("zb-v", 4)):
        for task, num_samples, num_calls in ((gpt, 4, 1), (tiny_task(0, 4), 40, 4)):
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
            yield Timing(what, step, num_samples, num_calls)
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


class Turns:
    """On a rank: when the tree of this rank works, and what it has measured."""

    def __init__(self, group: ec.Group, address: str) -> None:
        self._group = group
        self._compares = None
        if group.rank == 0:
            with socket.socket(socket.AF_UNIX) as connected:
                connected.connect(address)
                self._compares, self._number = connected.makefile("rw"), connected.fileno()

    def wait(self) -> None:
        """Wait for the next turn."""
        if self._compares is not None:
            wait([self._number])  # in which a simulated rank lets others run
            self._compares.readline()
        self._group.barrier()

    def say(self, reply: Mapping[str, Any]) -> None:
        """End the turn."""
        if self._compares is not None:
            self._compares.write(json.dumps(reply) + "\n")
            self._compares.flush()


def measure(world: ec.World, names: list[str], quick: bool, address: str) -> None:
    """On a rank: take turns in these workloads; with ``quick``, in one call of each."""
    torch.set_num_threads(1)
    turns = Turns(world.group, address)
    turns.wait()
    for item in chain.from_iterable(WORKLOADS[name](world.group) for name in names):
        if not isinstance(item, Timing):
            what, results = item
            turns.say({"facts": {f"{what}: {key}": value for key, value in results.items()}})
        else:
            timing = item._replace(num_samples=1, num_calls=1) if quick else item
            for _ in range(WARM_UP):
                timing.call()
            turns.say({"num_samples": timing.num_samples})
            for _ in range(timing.num_samples):
                turns.wait()
                turns.say({"times": timing.sample(world)})
        turns.wait()
    turns.say({"end": True})


class Job(NamedTuple):
    """The ranks of one tree, and what they listen to."""

    tree: Path
    ranks: TextIO

    def turn(self) -> dict[str, Any]:
        """Let this tree work; its reply."""
        self.ranks.write("\n")
        self.ranks.flush()
        line = self.ranks.readline()
        if not line:
            raise SystemExit(f"the ranks of {self.tree} ended before their work was done")
        reply: dict[str, Any] = json.loads(line)
        return reply


def _accepted(listener: socket.socket, job: subprocess.Popen[bytes], tree: Path) -> socket.socket:
    """The connection of a job that has started."""
    deadline = time.monotonic() + PATIENCE_S
    while not select.select([listener], [], [], 1.0)[0]:
        if job.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the ranks of {tree} did not start")
    return listener.accept()[0]


@contextmanager
def running(tree: Path, world: WorldKind, names: list[str], quick: bool) -> Iterator[Job]:
    """Two ranks with the sources of ``tree``, in processes of their own, until the body ends."""
    command = [sys.executable]
    if world is WorldKind.GLOO:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [str(HERE / "against.py"), str(tree), "--world", world, "--only", ",".join(names)]
    command += ["--quick"] if quick else []
    path = os.pathsep.join((str(tree / "src"), str(HERE)))
    environ = {**os.environ, **KEEP_MEMORY, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/turns")
        listener.listen()
        listener.setblocking(False)
        with subprocess.Popen([*command, "--address", f"{folder}/turns"], env=environ) as job:
            try:
                with _accepted(listener, job, tree) as connected:
                    connected.settimeout(PATIENCE_S)
                    with connected.makefile("rw") as ranks:
                        yield Job(tree, ranks)
                job.wait(PATIENCE_S)
            finally:
                job.terminate()  # it has ended, unless something failed


Pairs = dict[str, list[tuple[float, float]]]  # of both trees by what is timed: samples, in pairs


def compare(this: Job, other: Job, facts: list[Facts]) -> Pairs:
    """Let two jobs take turns until they have measured all, and add what they say."""
    pairs: Pairs = defaultdict(list)
    while True:
        first, second = this.turn(), other.turn()
        if "end" in first:
            return pairs
        if "facts" in first:
            facts += [first["facts"], second["facts"]]
        for number in range(first.get("num_samples", 0)):
            jobs = (this, other) if number % 2 == 0 else (other, this)
            times = {job: job.turn()["times"] for job in jobs}
            for what, seconds in times[this].items():
                pairs[what].append((seconds, times[other][what]))


def start_ranks(tree: Path, world: WorldKind, names: list[str], quick: bool, address: str) -> None:
    """Start the ranks of a job, or join them."""
    assert Path(ec.__file__).is_relative_to(tree), (ec.__file__, tree)
    if world is not WorldKind.GLOO:
        ec.run(measure, RANKS, world.value, args=(names, quick, address))
        return
    with ec.init("gloo") as joined:
        measure(joined, names, quick, address)


def main(
    other: Annotated[Path, typer.Argument(help="A checkout of another revision.")],
    world: Annotated[WorldKind, typer.Option(help="Where the ranks live.")] = WorldKind.PROCESSES,
    rounds: Annotated[int, typer.Option(help="How often all ranks start.")] = 4,
    only: Annotated[str, typer.Option(help="Workloads, with commas.")] = ",".join(WORKLOADS),
    quick: Annotated[bool, typer.Option("--quick", help="One call of each: to try it.")] = False,
    address: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Compare this tree with another one."""
    names = only.split(",")
    if unknown := set(names) - WORKLOADS.keys():
        raise typer.BadParameter(f"{sorted(unknown)}; there are {', '.join(WORKLOADS)}")
    if address:
        start_ranks(other, world, names, quick, address)
        return
    by_round: list[Pairs] = []
    facts: list[Facts] = []
    trees = (HERE.parent, other.resolve())
    for number in range(rounds):
        # The ranks that start first take 1 to 2 % longer for the same.
        direction = 1 if number % 2 == 0 else -1
        with (
            running(trees[::direction][0], world, names, quick) as first,
            running(trees[::direction][1], world, names, quick) as second,
        ):
            by_round.append(compare(*(first, second)[::direction], facts))
        print(f"round {number + 1} of {rounds}", flush=True)
    show(by_round, facts)


def show(by_round: Sequence[Pairs], facts: list[Facts]) -> None:
    """Print the times of both trees and their ratios, and whether the facts are the same.

    The same code takes up to 2 % longer in one start than in another, all its samples together. So
    the error of a ratio is that of the rounds, each of which counts once.
    """
    header = "other / this: median ± standard error (of the fastest)"
    print(f"{'':44} {'this, ms':>10} {'other, ms':>10}  {header}")
    for what in by_round[0]:
        pairs = [pair for of_round in by_round for pair in of_round[what]]
        this, other = (
            [seconds * 1e3 for seconds in of_tree] for of_tree in zip(*pairs, strict=True)
        )
        ratios = [statistics.median(b / a for a, b in of_round[what]) for of_round in by_round]
        error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else math.nan
        print(
            f"{what:44} {statistics.median(this):10.4f} {statistics.median(other):10.4f}"
            f"  {statistics.median(ratios):.3f} ± {error:.3f} ({min(other) / min(this):.3f})"
        )
    found = defaultdict(list)
    for what, value in chain.from_iterable(results.items() for results in facts):
        found[what].append(value)
    for what, values in found.items():
        same = all(value == values[0] for value in values)
        print(f"{what}: {values[0]}, {'the same' if same else 'NOT the same'} in all turns")


if __name__ == "__main__":
    typer.run(main)
