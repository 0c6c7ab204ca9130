"""``echelon checkpoint``: list, verify, convert and compare what was saved."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from echelon.checkpoint import files
from echelon.checkpoint.convert.convert import Converted, ConvertOptions, convert, step_at
from echelon.checkpoint.difference import differences
from echelon.checkpoint.names import step_of
from echelon.checkpoint.step import SavedStep
from echelon.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointTooNew
from echelon.errors.message_text import printable
from echelon.observe.progress import bytes_text

_SHOWN = 40  # rows of differences


def list_steps(folder: Path) -> int:
    """Print a row for each step; 1 if one cannot be read."""
    table = Table(box=box.MARKDOWN)
    for name in ("step", "ranks", "tensors", "size", "torch", "holds"):
        table.add_column(name, overflow="fold")
    code = 0
    for path in _steps(folder):
        try:
            with SavedStep(path) as step:
                manifest = step.manifest
                row = (
                    str(manifest.step),
                    str(manifest.world["size"]),
                    f"{len(manifest.tensors):,}",
                    bytes_text(sum(file.nbytes for file in manifest.files)),
                    manifest.versions.get("torch", ""),
                    ", ".join(sorted(step.sections)),
                )
        except CheckpointCorrupt as error:
            row = (path.name, "", "", "", "", f"damaged: {error}")
            code = 1
        except CheckpointTooNew as error:
            row = (path.name, "", "", "", "", f"not known here: {error}")
            code = 1
        table.add_row(*map(printable, row))  # somebody else may have written the files
    _console().print(table)
    return code


def verify_steps(folder: Path) -> int:
    """Compare all bytes with their checksums, and print a line a step; 1 unless all are whole."""
    code = 0
    for path in _steps(folder):
        try:
            with SavedStep(path) as step:
                step.verify(0, 1)
            _print(f"{path.name}: whole")
        except CheckpointCorrupt as error:
            _print(f"{path.name}: damaged: {error}")
            code = 1
        except CheckpointTooNew as error:
            _print(f"{path.name}: not known here: {error}")
            code = 1
    return code


def convert_state(source: Path, target: Path, options: ConvertOptions) -> int:
    """Write another form, and print what was written."""
    done = convert(source, target, options)
    for path in done.written:
        _print(f"wrote {path}")
    if done.left_out:
        _print(f"left out: {_names(done)}")
    return 0


def _names(done: Converted) -> str:
    more = len(done.left_out) - _SHOWN
    return ", ".join(done.left_out[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def compare_steps(one: Path, other: Path) -> int:
    """Print how two steps differ, of which every byte was verified; 1 if they do."""
    with ExitStack() as stack:
        first, second = (stack.enter_context(SavedStep(step_at(path))) for path in (one, other))
        for step in (first, second):
            step.verify(0, 1)
        found = list(differences(first, second))
    for name, what in found[:_SHOWN]:
        _print(f"{name}: {what}")
    if len(found) > _SHOWN:
        _print(f"and {len(found) - _SHOWN} more")
    if not found:
        _print("the same")
    return 1 if found else 0


def _steps(folder: Path) -> Iterable[Path]:
    if step_of(folder.name) is not None and folder.is_dir():
        return [folder]
    known = files.steps(folder)
    if not known:
        inside = [path for path in folder.glob("*") if path.is_dir() and os.access(path, os.R_OK)]
        below = sorted(path.name for path in inside if files.steps(path))
        there = f"; there are steps in {', '.join(map(repr, below[:10]))} below it" if below else ""
        raise CheckpointNotFound(f"no step was committed here{there}", folder)
    return [step_at(folder, step) for step in known]


def _print(text: str) -> None:
    _console().print(printable(text))


def _console() -> Console:
    return Console(soft_wrap=True, highlight=False, markup=False, emoji=False)
