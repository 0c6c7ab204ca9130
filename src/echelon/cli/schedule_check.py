"""``echelon schedule check``: whether a schedule from a file is legal, and the circle of waits."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.action_file import read_file, read_stream
from echelon.pipeline.schedules.judgement import USUAL_RULES, judge


def show(
    file: str, rules: Sequence[str] | None, *, batched: bool, files: Mapping[str, Path | None]
) -> int:
    """Print the verdict and write the files; returns 1 if the schedule is not legal."""
    if file == "-":
        text = read_stream(sys.stdin.buffer, "the standard input")
    else:
        text = read_file(Path(file))
    try:
        verdict = judge(text, rules or USUAL_RULES, batched=batched)
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from error
    typer.echo(str(verdict))
    for form, path in files.items():
        if path is None:
            continue
        try:
            path.write_text(verdict.to_svg() if form == "svg" else verdict.to_page())
        except OSError as error:
            raise ArgumentError(
                f"--{form} is {path}, which cannot be written: {error.strerror}; give a file in a "
                "folder that is there"
            ) from error
        typer.echo(f"the drawing is in {path}")
    return 0 if verdict.is_legal else 1
