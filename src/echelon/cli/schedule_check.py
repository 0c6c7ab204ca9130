"""``echelon schedule check``: whether a schedule from a file is legal, and the circle of waits."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.cli.output import say
from echelon.errors import ArgumentError
from echelon.pipeline.schedules.action_file import read_file, read_stream
from echelon.pipeline.schedules.judgement import USUAL_RULES, judge


def show(file: str, rules: Sequence[str] | None, *, batched: bool) -> int:
    """Print the verdict; returns 1 if the schedule is not legal."""
    if file == "-":
        text = read_stream(sys.stdin.buffer, "the standard input")
    else:
        text = read_file(Path(file))
    try:
        verdict = judge(text, rules or USUAL_RULES, batched=batched)
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}") from error
    say(str(verdict))
    return 0 if verdict.is_legal else 1
