"""A training that dies or hangs where it is told to, in each way to run it, and how that ends."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import conftest
from tests.cli.jobs import ECHELON_RUN, Job
from tests.processes import wait_until

__all__ = ["IMPORTS", "LAST_WHOLE", "MOMENTS", "WAYS", "Ended", "end_of", "run_out"]

ROOT = Path(__file__).resolve().parent.parent.parent
WAYS = {
    "echelon run, shm": (ECHELON_RUN, "shm"),
    "echelon run, gloo": (ECHELON_RUN, "gloo"),
    "ec.run, processes": ((sys.executable,), "processes"),
}
MOMENTS = {  # of rank 1, and where it is then said to be
    "start": "before echelon.init()",
    "step": "at step 3",
    "save": "at step 4",
}
LAST_WHOLE = 2  # the step that was saved before
TOLD, FAULT = "told", "fault"  # files: what ec.run raised, and when rank 1 met its fault
LEFT_S = 10.0  # to see that nothing is left; longer than any bar

IMPORTS = f"""
import multiprocessing, os, pathlib, sys, time

sys.path.insert(0, {str(ROOT)!r})  # for those of the tests
from tests.checkpoint.disks import Disk
from tests.checkpoint.layouts import LAYOUTS, batch, mse
from tests.comm.faults import DEATHS, HANGS

import echelon as ec
"""
SCRIPT = f"""
{IMPORTS}
folder, fault, moment, way, seconds = pathlib.Path(sys.argv[1]), *sys.argv[2:]
names = os.environ.get("RANK", ""), multiprocessing.current_process().name


def meet():
    (folder / "{FAULT}").write_text(repr(time.time()))
    (DEATHS | HANGS)[fault]()


def strike(call, act, part):
    if (call.op, call.what) != ("write", "rank file"):
        return act()
    part()
    meet()


def main(world):
    trainee = LAYOUTS["ddp2"].trainee(world)
    for step in range(1, 11):
        x, y = batch(step)
        mse(trainee.model(x[world.rank :: 2]), y[world.rank :: 2]).backward()
        if (world.rank, step, moment) == (1, 4, "step"):
            meet()
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
        if (world.rank, step, moment) == (1, 4, "save"):
            Disk(strike).__enter__()
        if step % 2 == 0:
            parts = dict(model=trainee.model, optimizer=trainee.optimizer)
            ec.save(folder / "run", step=step, **parts)


if "0" in names or "rank 0" in names:
    (folder / "rank-0-starts").touch()
if moment == "start" and ("1" in names or "rank 1" in names):
    while not (folder / "rank-0-starts").exists():
        time.sleep(0.02)
    time.sleep(2.0)  # it waits for us now
    meet()
if __name__ == "__main__":
    if way == "processes":
        try:
            ec.run(main, 2, way, timeout=float(seconds))
        except BaseException as error:
            said = [f"{{type(error).__name__}}: {{error}}", *error.__notes__]
            (folder / "{TOLD}").write_text("\\n".join(said))
            raise
    else:
        with ec.init(way, timeout=float(seconds)) as world:
            main(world)
"""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended.

    Attributes:
        code: its exit code.
        lines: of standard error.
        told: what the user is told: those lines, or of ``ec.run`` the error and its notes.
        seconds: from the fault to the end of the last process.
        stacks: of all ranks, where one waited in vain.
    """

    code: int
    lines: Sequence[str]
    told: Sequence[str]
    seconds: float
    stacks: str


def run_out(job: Job) -> tuple[int, list[str], float]:
    """Wait for the end of a job that has just been started, and see that nothing is left of it.

    Returns:
        its exit code, its lines on standard error, and when its last process had ended.
    """
    mark, before = os.environ[conftest.MARK], conftest.shared_memory_files()
    code, _, lines = job.end()
    wait_until(lambda: not job.processes(), limit_s=LEFT_S)
    ended_s = time.time()
    # Other sessions of this machine have files there, too, which come and go.
    wait_until(
        lambda: all(
            conftest.used_by_others(name, mark) for name in conftest.shared_memory_files() - before
        ),
        limit_s=LEFT_S,
    )
    return code, lines, ended_s


def end_of(folder: Path, way: str, fault: str, moment: str, timeout: float) -> Ended:
    """Run the training until it has met ``fault``, and see how all of it ends.

    Args:
        timeout: seconds that a rank waits for others.
    """
    launcher, backend = WAYS[way]
    arguments = (str(folder), fault, moment, backend, f"{timeout:g}")
    with Job(folder, SCRIPT, *arguments, launcher=launcher) as job:
        code, lines, ended_s = run_out(job)
    told, stacks = folder / TOLD, list(folder.glob("temporary/*/*/*/*/error-stacks.txt"))
    return Ended(
        code=code,
        lines=lines,
        told=told.read_text().splitlines() if told.exists() else lines,
        seconds=ended_s - float((folder / FAULT).read_text()),
        stacks="\n".join(path.read_text() for path in stacks),
    )
