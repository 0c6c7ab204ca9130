"""``echelon race``: run any script on simulated devices, and name what races in it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from echelon.cli.output import say
from echelon.cli.run_command import Ranks
from echelon.errors import ArgumentError
from echelon.errors.message_text import counted
from echelon.launch.program import Launch, Program

_PROGRAM = "echelon.testing.device.raced_script"


class _Run(NamedTuple):
    """What one run of the script has found, by rank."""

    name: str
    code: int
    races: Sequence[Sequence[str]]
    digests: Sequence[Sequence[str]]


def race(
    script: Annotated[str, typer.Argument(help="A Python script, of whatever library.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="For the script.")
    ] = None,
    ranks: Ranks = None,
    seeds: Annotated[
        int, typer.Option(min=0, help="How many random orders to run beside the other two.")
    ] = 3,
) -> int:
    """Run SCRIPT on simulated devices, one a rank, and name its races between streams.

    No GPU is needed: "cuda" and "nccl" mean a device that runs on the CPU. A race is two uses of
    the same memory that no wait orders, whatever the timing was. The script runs once with all work
    at once, once with all work as late as it may be, and in random orders; what it copies to the
    host has to be the same each time. Returns 1 if there is a race or a difference.
    """
    program = Program(script)
    if (problem := program.problem()) is not None:
        raise typer.BadParameter(problem, param_hint="SCRIPT")
    say('echelon: "cuda" and "nccl" are simulated devices of this machine, in this program only')
    orders = [("EAGER", 0), ("LAZY", 0), *(("RANDOM", seed) for seed in range(1, seeds + 1))]
    runs = []
    for order, seed in orders:
        runs.append(_run(script, arguments or [], ranks or 1, order, seed))
        if runs[-1].code:
            say(f"the script has failed in {runs[-1].name}")
            break
    return _show(runs)


def _run(script: str, arguments: Sequence[str], ranks: int, order: str, seed: int) -> _Run:
    from echelon.launch import local_job
    from echelon.launch.rank_output import RunFolder

    with tempfile.TemporaryDirectory() as folder:
        launch = Launch(
            program=Program(_PROGRAM, is_module=True),
            arguments=(folder, order, str(seed), script, *arguments),
            ranks=ranks,
        )
        code = local_job.run_processes(launch, RunFolder(None))
        found = [_found(Path(folder, f"rank{rank}.json")) for rank in range(ranks)]
    name = f"order {order.lower()}" + (f" {seed}" if order == "RANDOM" else "")
    return _Run(name, code, [each["races"] for each in found], [each["digests"] for each in found])


def _found(path: Path) -> dict[str, Any]:
    """What a rank has written; nothing, if it has ended before."""
    if not path.exists():
        return {"races": [], "digests": []}
    found: dict[str, Any] = json.loads(path.read_bytes())
    if not isinstance(found, dict):
        raise ArgumentError(f"{path} is no record of a rank")
    return found


def _show(runs: Sequence[_Run]) -> int:
    """Print the races of all ranks, and how the orders differ; the exit code."""
    of_text: dict[str, list[int]] = {}
    for rank, races in enumerate(runs[0].races):
        for text in races:
            of_text.setdefault(text, []).append(rank)
    for text, ranks in of_text.items():
        whose = "" if len(runs[0].races) == 1 else f"rank {', '.join(map(str, ranks))}: "
        say(f"\n{whose}{text}")
    different = [
        f"{run.name}, rank {rank}"
        for run in runs[1:]
        for rank, (first, other) in enumerate(zip(runs[0].digests, run.digests, strict=True))
        if first != other
    ]
    if different:
        say(f"\nthe host saw other values than in {runs[0].name} in: {'; '.join(different)}")
    has_failed = bool(runs[-1].code)
    until = ", until the script failed" if has_failed else ""
    say(f"\n{counted(len(of_text), 'race')} in {counted(len(runs), 'run')}{until}")
    return int(bool(of_text or different or has_failed))
