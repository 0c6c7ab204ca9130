"""Starts a job of ``trainees.py`` or ``fabric_trainees.py``; returns what its function returned."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
LIMIT_S = 280


def command_of(ranks: int, function: str, result: Path, *arguments: Any) -> list[str]:
    """The command line of a job."""
    file = HERE / ("fabric_trainees.py" if function.startswith("fabric") else "trainees.py")
    script = [str(file), function, str(result), *map(json.dumps, arguments)]
    return [sys.executable, "-m", "echelon", "run", "--ranks", str(ranks), *script]


def environment_of(**variables: str) -> dict[str, str]:
    """The environment of a job: one thread a rank, and torch's own gloo where a script says so."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "ECHELON_OWN_BACKENDS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")]),
        **variables,
    }


def finished(folder: Path, ranks: int, function: str, *arguments: Any) -> tuple[int, str]:
    """The exit code and the output of a job."""
    command = command_of(ranks, function, folder / "result.pt", *arguments)
    env = environment_of(TMPDIR=str(folder))  # where logs of a failure stay
    done = subprocess.run(
        command, env=env, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S
    )
    return done.returncode, done.stdout + done.stderr


def result_of(folder: Path, ranks: int, function: str, *arguments: Any) -> Any:
    """What the function returned on rank 0."""
    code, output = finished(folder, ranks, function, *arguments)
    assert code == 0, output[-4000:]
    return torch.load(folder / "result.pt", weights_only=False)
