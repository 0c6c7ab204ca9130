"""What it costs that ranks measure themselves, and how often the verdict is right.

python benchmarks/held_up.py [--runs 20] [--rounds 10] [--world threads] [--technique DDP]
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import held_up_ranks
import typer
from bars import Outcome, bar_table
from held_up_ranks import RANKS, TECHNIQUES
from ranks import run_to_end
from report import console_for_tables, write_report

import echelon as ec

WORLDS = ("threads", "processes", "gloo")
BOUND = 0.01  # of a step
LIMIT_S = 1800.0
EXPECTED = {(1, "BACKWARD"), (2, "LOADING")}


def verdicts(world: str, techniques: Sequence[str], runs: int) -> dict[str, Any]:
    """What each of so many runs says, by technique: with slow ranks, and without."""
    if world != "gloo":
        return ec.run(held_up_ranks.verdicts_of, RANKS, world, args=(techniques, runs))[0]
    with tempfile.TemporaryDirectory(prefix="echelon-bench-") as folder:
        output = Path(folder) / "verdicts.json"
        script = [str(held_up_ranks.__file__), ",".join(techniques), str(runs), str(output)]
        run_to_end(
            [sys.executable, "-m", "echelon", "run", "--ranks", str(RANKS), *script], LIMIT_S
        )
        said: dict[str, Any] = json.loads(output.read_text())
        return said


def judged(world: str, technique: str, said: dict[str, Any], runs: int) -> list[Outcome]:
    """How many runs named both slow ranks and nobody else, and how many usual ones named one."""
    right = sum({(rank, what) for rank, what, _ in costs} == EXPECTED for costs in said["slow"])
    alarms = sum(bool(costs) for costs in said["usual"])
    what = f"{technique}, {world}, {RANKS} ranks"
    return [
        Outcome(what, "both slow ranks named", f"{runs} of {runs}", right, "runs", right == runs),
        Outcome(what, "no slow rank: verdicts", "none", alarms, "runs", not alarms),
    ]


def main(
    runs: Annotated[int, typer.Option(help="With slow ranks, and without, in each world.")] = 20,
    rounds: Annotated[int, typer.Option(help="Pairs of steps whose cost is measured.")] = 10,
    layers: Annotated[int, typer.Option(help="Blocks of the GPT.")] = 8,
    batch: Annotated[int, typer.Option(help="Sequences of a rank.")] = 2,
    world: Annotated[list[str] | None, typer.Option(help="Only these; several times.")] = None,
    technique: Annotated[list[str] | None, typer.Option(help="Only these, as well.")] = None,
    output: Annotated[Path | None, typer.Option(help="The JSON file.")] = None,
) -> None:
    """Measure the cost, and count right and wrong verdicts."""
    outcomes, cases = [], []
    for name in ("DDP", "FSDP") if rounds else ():
        args = (name, layers, batch, rounds)
        ranks = ec.run(held_up_ranks.cost_of, 2, "processes", args=args)
        pairs = [
            zip(rank["seconds"]["measured"], rank["seconds"]["not measured"], strict=True)
            for rank in ranks
        ]
        ratio = statistics.median(on / off for rank in pairs for on, off in rank)
        step_s = statistics.median(ranks[0]["seconds"]["not measured"])
        share = max(rank["cost_s"] for rank in ranks) / step_s
        changes = ranks[0]["changes"]
        what = f"GPT, {name}, {changes} changes of activity in a step of {1e3 * step_s:.0f} ms"
        bar = f"≤ {100 * BOUND:g} % of a step"
        outcomes.append(Outcome(what, "added up", bar, 100 * share, "%", share <= BOUND))
        cases.append({"wrapper": name, "ranks": ranks, "ratio_of_pairs": ratio, "share": share})
        print(f"{what}: steps with and without, median of {2 * rounds} pairs: {ratio:.4f}")
    for kind in (world or WORLDS) if runs else ():
        start_s = time.perf_counter()
        for name, said in verdicts(kind, technique or TECHNIQUES, runs).items():
            outcomes += judged(kind, name, said, runs)
            cases.append({"world": kind, "technique": name, "verdicts": said})
        print(f"{kind}: {time.perf_counter() - start_s:.0f} s, load {os.getloadavg()[0]:.1f}")
    console = console_for_tables()
    console.print(bar_table(outcomes))
    path = write_report("held_up", outcomes, output, cases=cases)
    console.print(f"All numbers are in {path}")


if __name__ == "__main__":
    typer.run(main)
