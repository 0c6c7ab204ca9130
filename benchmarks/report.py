"""What a benchmark prints and writes: tables, and a JSON file with every sample and the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from bars import Outcome

__all__ = ["RESULTS", "console_for_tables", "machine", "markdown_table", "versions", "write_report"]

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


def markdown_table(title: str, text: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table, as Markdown, with columns of text and then columns of numbers."""
    table = Table(title=title, box=box.MARKDOWN, title_justify="left")
    for name in text:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def write_report(
    name: str, outcomes: Sequence[Outcome], output: Path | None, **measured: object
) -> Path:
    """Write a JSON file, by default ``results/name.json``; returns its path.

    Args:
        outcomes: of the bars.
        measured: everything else, by name.
    """
    path = output or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"benchmark": name, "machine": machine(), "versions": versions()}
    content |= measured
    content["bars"] = [asdict(outcome) for outcome in outcomes]
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
