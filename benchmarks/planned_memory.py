"""Compares the memory that a dry run predicts for a step with what is allocated in it.

    python benchmarks/planned_memory.py                  # all cases
    python benchmarks/planned_memory.py --only pp=2

Each case runs on local processes that communicate by gloo, and the allocator of each rank is asked
for its peak. The prediction runs one rank of each stage, which is compared with the ranks of that
stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from memory_cases import MemoryCase, cases, next_token_loss
from report import markdown_table
from rich.console import Console

from echelon.planner.dry_run import DryRunOptions, dry_run

RANK = Path(__file__).parent / "allocated.py"


def measure(case: MemoryCase) -> list[int]:
    """The peak of each rank."""
    command = [sys.executable, "-m", "echelon", "run", "--ranks", str(case.plan.num_ranks)]
    done = subprocess.run(
        [*command, str(RANK), json.dumps(asdict(case))], capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{case}: {done.stdout}{done.stderr}")
    [line] = [line for line in done.stdout.splitlines() if line.startswith("PEAKS ")]
    peaks: list[int] = json.loads(line.removeprefix("PEAKS "))
    return peaks


def predict(case: MemoryCase) -> list[int]:
    """The peak of the first rank of each stage."""
    tokens = case.tokens()
    options = DryRunOptions(units=case.units, over_gloo=True)
    steps = dry_run(case.model(), case.plan, tokens, tokens, next_token_loss, options)
    return [step.peak for step in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="cases whose text contains this")
    args = parser.parse_args()
    table = markdown_table("peak of a step", ("case", "MiB", "planned MiB", "off", "s"), ())
    errors: list[float] = []
    for case in cases():
        if args.only not in str(case):
            continue
        peaks, start_s = measure(case), time.perf_counter()
        planned = predict(case)
        seconds = time.perf_counter() - start_s
        beside = case.plan.dp * case.plan.shard
        off = [planned[rank // beside] / peak - 1 for rank, peak in enumerate(peaks)]
        errors += off
        worst = max(off, key=abs)
        row = f"{max(peaks) / 2**20:.1f}", f"{max(planned) / 2**20:.1f}", f"{worst:+.2%}"
        print(str(case), *row, flush=True)
        table.add_row(str(case), *row, f"{seconds:.1f}")
    Console().print(table)
    within = sum(abs(error) <= 0.02 for error in errors) / len(errors)
    print(
        f"{len(errors)} ranks: {within:.1%} within 2 %, worst {max(map(abs, errors)):.2%}, "
        f"median {statistics.median(map(abs, errors)):.3%}"
    )


if __name__ == "__main__":
    main()
