"""The training script of docs/resume.md under the launchers of other pages, on this machine."""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from pathlib import Path
from typing import Any

import torch

import echelon as ec
from tests.children import environ

__all__ = [
    "DOCS",
    "RANKS",
    "SAVE_EVERY",
    "STEPS",
    "blocks",
    "children",
    "environ_of_job",
    "started_job",
    "trains_on",
    "write_training",
]

DOCS = Path(__file__).resolve().parent.parent / "docs"
RANKS = 2
STEPS, SAVE_EVERY = 240, 20
_WORKERS = ", num_workers=2, persistent_workers=True"


def blocks(name: str, language: str) -> list[str]:
    """The code of one language in a document."""
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / name).read_text(), re.DOTALL)


def write_training(folder: Path) -> None:
    """Write the script as ``train.py``, with fewer steps."""
    text = blocks("resume.md", "python")[0]
    written = '"runs/a", 1000, 100'
    assert written in text
    (folder / "train.py").write_text(text.replace(written, f'"runs/a", {STEPS}, {SAVE_EVERY}'))


def environ_of_job(*folders: Path, **variables: str) -> dict[str, str]:
    """The environment of a job whose programs are looked for in ``folders``, then as usual."""
    places = [*map(str, folders), str(Path(sys.executable).parent), os.environ["PATH"]]
    return environ(**variables, PATH=os.pathsep.join(places))


@contextmanager
def started_job(
    command: Sequence[str],
    folder: Path,
    env: Mapping[str, str],
    *,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.PIPE,
) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a session of its own, with the training script in ``folder``."""
    write_training(folder)
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=env,
        stdout=stdout,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:  # a failed test
            os.killpg(process.pid, signal.SIGKILL)
        with process:  # which waits for it and closes its pipe
            pass


def children(pid: int) -> list[int]:
    """The processes that a process has started, and not those of its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def trains_on(folder: Path) -> dict[str, Any]:
    """The weights when the job of ``folder`` has gone on to its end, on simulated ranks."""
    write_training(folder)
    text = (folder / "train.py").read_text()
    assert _WORKERS in text
    # Threads should not be forked, and who loads the data makes no difference.
    (folder / "train.py").write_text(text.replace(_WORKERS, ""))
    with chdir(folder):
        ec.run(runpy.run_path("train.py")["main"], RANKS)
    model = torch.nn.Linear(8, 1)
    assert ec.load(folder / "runs" / "a", model=model, rng=False).step == STEPS
    return model.state_dict()
