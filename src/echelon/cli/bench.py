"""Benchmarks live beside the package in a checkout, not inside it; this finds and runs them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

__all__ = ["run_benchmark"]

_CHECKOUT = Path(__file__).resolve().parents[3]


def run_benchmark(name: str, arguments: Sequence[str]) -> int:
    """Run ``benchmarks/NAME.py``; its exit code.

    Raises:
        BadParameter: there is no such benchmark; lists those that there are.
    """
    folder = _CHECKOUT / "benchmarks"
    # The others are what benchmarks are made of.
    found = sorted(
        path.stem for path in folder.glob("*.py") if "typer.run(main)" in path.read_text()
    )
    if not found:
        raise typer.BadParameter(
            f"there are no benchmarks in {folder}: they are part of the repository, not of the "
            "installed package. Clone it and install it with pip install -e .",
            param_hint="NAME",
        )
    if name not in found:
        raise typer.BadParameter(
            f"there is no benchmark {name!r}; there are: {', '.join(found)}", param_hint="NAME"
        )
    return subprocess.run(
        [sys.executable, folder / f"{name}.py", *arguments], check=False
    ).returncode
