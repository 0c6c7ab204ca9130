"""Scripts that end while a save is under way, and how they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import echelon as ec

__all__ = ["ENDS", "WORLDS", "run_script"]

# How a script comes to have a group to save over.
WORLDS = {
    "alone": "given = {}",
    "world of one": "given = {'group': ec.init().group}",
    "open world": "world = ec.init(); model = ec.DDP(model, world.group); given = {}",
    "over gloo": "world = ec.init('gloo'); model = ec.DDP(model, world.group); given = {}",
}
# The last lines of a script.
ENDS = {
    "ends": "",
    "leaves": "sys.exit(0)",
    "closes": "ec.init().close()",
    "is in a world that failed": """
def failing(world):
    shared = ec.DDP(nn.Linear(2, 2), world.group)
    ec.async_save(sys.argv[1] + "-other", step=1, model=shared)
    raise KeyError("of a rank")
try:
    ec.run(failing, 2)
except KeyError:
    pass
""",
}

SCRIPT = """
import resource, signal, sys
import torch
from torch import nn
import echelon as ec

model = nn.Linear(300, 300)
{world}
if sys.argv[2] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
ec.async_save(sys.argv[1], step=1, model=model, **given)
print("returned", flush=True)
{end}
"""


def run_script(
    folder: Path, *, world: str, end: str, full: bool, launcher: tuple[str, ...] = ()
) -> tuple[int, str]:
    """Run a script; its exit code and what it wrote to standard error.

    Args:
        full: whether a file of the save finds no room.
        launcher: what starts it, if not Python itself.
    """
    script = folder / "script.py"
    script.write_text(SCRIPT.format(world=WORLDS[world], end=ENDS[end]))
    command = [*(launcher or (sys.executable,)), str(script), str(folder / "run")]
    found = subprocess.run(
        [*command, "full" if full else "free"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "returned" in found.stdout, found.stderr
    assert ec.steps(folder / "run") == ([] if full else [1]), found.stderr
    return found.returncode, found.stderr
