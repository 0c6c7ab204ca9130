"""A step of the GPT under FSDP with this tree's sources and with those of another one, in turns.

    git worktree add /tmp/before REVISION
    python benchmarks/against.py /tmp/before [--rounds 8] [--steps 12]

Every turn starts two ranks that share memory, warms them up and times some steps; what is compared
is the medians of two turns that follow each other. Also compared are the peaks of whole parameters
and of gradients, which do not depend on the machine.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

HERE = Path(__file__).resolve().parent
WARM_UP = 3  # steps that make optimizer states and learn orders


def timed(world: Any, steps: int) -> dict[str, Any]:
    """On a rank: the seconds of each step, and the peaks."""
    import torch
    from models import UNITS, GPTConfig, gpt_task

    import echelon as ec

    task = gpt_task(world.rank, GPTConfig(), 2)
    rule = ec.units.by_type(*UNITS)
    model = ec.FSDP(task.build(), world.group, units=rule, min_num_params=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    seconds, cpu = [], []
    for step in range(WARM_UP + steps):
        inputs, targets = task.batches[step % len(task.batches)]
        world.group.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
    stats = model.memory_stats()
    peaks = [stats.peak_gathered, stats.peak_gradients]
    times = {
        "seconds": statistics.median(seconds[WARM_UP:]),
        "cpu": statistics.median(cpu[WARM_UP:]),
    }
    return {**times, "peaks": peaks, "loss": loss.item()}


def turn(tree: Path, steps: int) -> dict[str, Any]:
    """Two ranks with the sources of ``tree``, in processes of their own."""
    command = [sys.executable, str(HERE / "against.py"), "--ranks-of", str(steps), str(tree)]
    path = os.pathsep.join((str(tree / "src"), str(HERE)))
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(
    other: Annotated[Path, typer.Argument(help="A checkout of another revision.")],
    rounds: Annotated[int, typer.Option(help="Pairs of turns.")] = 8,
    steps: Annotated[int, typer.Option(help="Timed steps of a turn.")] = 12,
    ranks_of: Annotated[int, typer.Option(hidden=True)] = 0,
) -> None:
    """Compare this tree with another one."""
    if ranks_of:
        import echelon as ec

        assert Path(ec.__file__).is_relative_to(other), (ec.__file__, other)
        found = ec.run(timed, 2, "processes", args=(ranks_of,))
        print(json.dumps(found[0]), flush=True)
        return
    this = HERE.parent
    ours, theirs = [], []
    for number in range(rounds):
        order = (this, other.resolve()) if number % 2 == 0 else (other.resolve(), this)
        pair = {tree: turn(tree, steps) for tree in order}
        ours.append(pair[this])
        theirs.append(pair[other.resolve()])
        print(
            f"{number + 1}: {ours[-1]['seconds']:.4f} s, {theirs[-1]['seconds']:.4f} s", flush=True
        )
    for key, what in (("seconds", "step"), ("cpu", "processor time of a step")):
        middle = [statistics.median(one[key] for one in each) for each in (ours, theirs)]
        ratios = [a[key] / b[key] for a, b in zip(ours, theirs, strict=True)]
        print(
            f"{what}: {middle[0]:.4f} s, other {middle[1]:.4f} s; ratio of pairs "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
        )
    print(f"peak bytes, whole and gradients: {ours[0]['peaks']}, other {theirs[0]['peaks']}")
    print(f"loss: {ours[0]['loss']!r}, other {theirs[0]['loss']!r}")


if __name__ == "__main__":
    typer.run(main)
