"""How long 500 tests of 4 ranks take with echelon's pytest plugin, and with ``mp.spawn`` and gloo.

python benchmarks/pytest_ranks.py [--tests 500] [--ranks 4] [--sample 2] [--rounds 3]

Every test does the same in both: an all-reduce, and a training step of a small model whose
gradients are averaged over the ranks and compared with one process. Tests with ``mp.spawn`` take
seconds each, so only a sample of them runs, and their time is that of one test times the number.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from bars import Outcome, bar_table
from report import console_for_tables, markdown_table, write_report

BOUND_S = 30.0
PLUGIN = "echelon.laboratory.pytest_plugin"

BODY = '''
import pytest
import torch
from torch import nn


def check(rank, size, all_reduce, seed):
    """One test: what the ranks compute together is what one process computes."""
    total = torch.tensor([rank])
    all_reduce(total)
    assert total.item() == size * (size - 1) // 2
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    x = torch.randn(8 * size, 16, dtype=torch.float64)
    model(x[rank::size]).pow(2).mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    for gradient in gradients:
        all_reduce(gradient)
    model.zero_grad()
    model(x).pow(2).mean().backward()
    for gradient, parameter in zip(gradients, model.parameters()):
        torch.testing.assert_close(gradient / size, parameter.grad, rtol=1e-12, atol=1e-14)
'''

WITH_PLUGIN = """
@pytest.mark.ranks({ranks})
@pytest.mark.parametrize("seed", range({tests}))
def test_it(world, seed):
    check(world.rank, world.size, world.group.all_reduce, seed)
"""

WITH_SPAWN = """
import socket
import torch.distributed as dist
import torch.multiprocessing as mp


def main_of_rank(rank, size, port, seed):
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{{port}}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size)
    check(rank, size, dist.all_reduce, seed)
    dist.destroy_process_group()


@pytest.mark.parametrize("seed", range({tests}))
def test_it(seed):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(main_of_rank, args=({ranks}, port, seed), nprocs={ranks})
"""


def session_s(source: str, ranks: int, tests: int, *arguments: str) -> tuple[float, float]:
    """Seconds of a session of so many tests, of which all pass: as a whole, and without its start.

    The start of pytest and the imports of torch are in the first, and only the tests in the second.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "test_ranks.py"
        path.write_text(BODY + source.format(ranks=ranks, tests=tests))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=0"]
        command += ["--durations-min=0", "-vv", f"--rootdir={folder}", *arguments, str(path)]
        start_s = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        seconds = time.perf_counter() - start_s
    if done.returncode != 0 or f"{tests} passed" not in done.stdout:
        raise RuntimeError(f"the tests did not pass:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    calls = [float(found) for found in re.findall(r"^([0-9.]+)s call ", done.stdout, re.M)]
    return seconds, sum(calls)


def main(
    tests: Annotated[int, typer.Option(help="Number of tests.")] = 500,
    ranks: Annotated[int, typer.Option(help="Ranks of each test.")] = 4,
    sample: Annotated[int, typer.Option(help="Tests with mp.spawn of a round.")] = 2,
    rounds: Annotated[int, typer.Option(help="How often each is measured, in alternation.")] = 3,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure sessions of pytest, each in a process of its own."""
    ours_s, theirs_s, theirs_per_test_s = [], [], []
    for _ in range(rounds):
        ours_s.append(session_s(WITH_PLUGIN, ranks, tests, "-p", PLUGIN)[0])
        whole_s, calls_s = session_s(WITH_SPAWN, ranks, sample, "-p", f"no:{PLUGIN}")
        theirs_per_test_s.append(calls_s / sample)
        theirs_s.append(whole_s - calls_s + calls_s / sample * tests)
    seconds, spawned_s = statistics.median(ours_s), statistics.median(theirs_s)
    task = f"{tests} tests of {ranks} ranks"
    outcome = Outcome(task, "echelon", f"≤ {BOUND_S:g} s", seconds, "s", seconds <= BOUND_S)
    console = console_for_tables()
    table = markdown_table(task, ("with",), ("session, s", "one test, ms"))
    table.add_row(
        "echelon's plugin, simulated ranks", f"{seconds:.1f}", f"{seconds / tests * 1e3:.1f}"
    )
    per_test_s = statistics.median(theirs_per_test_s)
    name = f"mp.spawn and gloo (extrapolated from {sample * rounds} tests)"
    table.add_row(name, f"{spawned_s:.0f}", f"{per_test_s * 1e3:.0f}")
    console.print(table)
    console.print(bar_table([outcome]))
    path = write_report(
        "pytest_ranks",
        [outcome],
        output,
        settings={"tests": tests, "ranks": ranks, "sample": sample, "rounds": rounds},
        echelon_s=ours_s,
        spawn_extrapolated_s=theirs_s,
        spawn_per_test_s=theirs_per_test_s,
    )
    console.print(f"All numbers are in {path}")


if __name__ == "__main__":
    typer.run(main)
