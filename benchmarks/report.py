"""What a benchmark leaves: a JSON file with every sample and the facts of the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["RESULTS", "console_for_tables", "machine", "versions", "write_json"]

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def machine() -> dict[str, Any]:
    """The processor, its cores, the memory, the kernel, and how busy it was at the start."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown"
    memory = _field("/proc/meminfo", "MemTotal") or "0 kB"
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1),
        "kernel": platform.release(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str | None]:
    """Versions of all that is compared; None where it is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("echelon", "torch", "numpy", "mpi4py", "mpich"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    found["commit"] = _commit()
    return found


def console_for_tables() -> Console:
    """A console that is wide enough for a table when its output is piped."""
    console = Console()
    return console if console.is_terminal else Console(width=160)


def write_json(name: str, content: Mapping[str, Any], output: Path | None) -> Path:
    """Write ``content``, by default to ``results/name.json``; returns where."""
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _field(path: str, name: str) -> str | None:
    """The value of the first ``name : value`` line of a file of /proc."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _commit() -> str | None:
    """The commit that was measured, with ``+`` if files differ; None outside a repository."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--abbrev=12", "--dirty=+"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
