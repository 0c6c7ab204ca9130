"""A job that saves every few steps, stops when it is asked to, and goes on from what it saved."""

from __future__ import annotations

import json
from pathlib import Path

__all__ = ["NUM_STEPS", "SCRIPT", "Progress", "progress", "result"]

NUM_STEPS = 150

SCRIPT = f"""
import json, os, pathlib, signal, sys, time
import torch
import echelon as ec

folder = pathlib.Path(sys.argv[1])
state, log = folder / "state.json", folder / "log"
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
asked = []
for name in ("SIGTERM", "SIGUSR1"):
    signal.signal(getattr(signal, name), lambda number, frame: asked.append(number))

def save(world, step, total):
    if world.rank == 0:
        part = state.with_suffix(".part")
        part.write_text(json.dumps({{"step": step, "total": total}}))
        part.replace(state)
    world.group.barrier()

stopped = False
with ec.init() as world:
    (folder / f"pid-{{world.rank}}-{{attempt}}").write_text(str(os.getpid()))
    saved = json.loads(state.read_text()) if state.exists() else {{"step": 0, "total": 0.0}}
    step, total = saved["step"], saved["total"]
    while step < {NUM_STEPS} and not stopped:
        step += 1
        value = torch.tensor([step * (world.rank + 1.0), float(bool(asked))], dtype=torch.float64)
        world.group.all_reduce(value)
        total, stopped = total + value[0].item(), value[1].item() > 0
        if world.rank == 0:
            with log.open("a") as lines:
                lines.write(f"{{time.time()}} {{attempt}} {{step}}\\n")
        time.sleep(0.02)
        if stopped or step % 10 == 0 or step == {NUM_STEPS}:
            save(world, step, total)
sys.exit(75 if stopped else 0)
"""


class Progress:
    """One step of the job, from its log.

    Args:
        line: of the log.
    """

    def __init__(self, line: str) -> None:
        time_s, attempt, step = line.split()
        self.time_s, self.attempt, self.step = float(time_s), int(attempt), int(step)


def progress(folder: Path) -> list[Progress]:
    """The steps so far; a step that was lost and done again is there twice."""
    log = folder / "log"
    text = log.read_text() if log.exists() else ""
    return [Progress(line) for line in text.rpartition("\n")[0].splitlines()]


def result(folder: Path) -> dict[str, float]:
    """What the job saved last."""
    saved: dict[str, float] = json.loads((folder / "state.json").read_text())
    return saved
