"""Frames of simulated ranks as a user knows them, and the table of all ranks."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import TypeAlias, final

from echelon.diagnosis.stacks import is_user_file
from echelon.process.notebook import place_name

Stack: TypeAlias = list[tuple[FrameType, int]]  # frames with their lines, the innermost last

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_BESIDE = (_PACKAGE, threading.__file__)


@final
@dataclass(frozen=True)
class RankView:
    """One rank as the debugger shows it.

    Attributes:
        rank: in the job.
        stack: of the rank; empty if it runs no code.
        doing: what it does, in a few words.
    """

    rank: int
    stack: Stack
    doing: str


def is_users(frame: FrameType) -> bool:
    """Whether a frame is neither of this package, nor of Python, nor of what is installed."""
    file = frame.f_code.co_filename
    if file.startswith(_PACKAGE):
        return False
    return is_user_file(file) or frame.f_globals.get("__name__") == "__main__"


def is_inside_echelon(frame: FrameType | None) -> bool:
    """Whether this package has called a frame, and not a user; or nobody has."""
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        if is_users(frame):
            return False
        frame = frame.f_back
    return True


def stack_of_frame(frame: FrameType | None) -> Stack:
    """All frames of a thread, from its innermost one."""
    return [] if frame is None else list(traceback.walk_stack(frame))[::-1]


def stack_of_traceback(trace: TracebackType | None) -> Stack:
    """The frames of an error."""
    return list(traceback.walk_tb(trace))


def without_echelon(stack: Stack) -> Stack:
    """The frames from the user's outermost one on, but those of this package."""
    users = [i for i, (frame, _) in enumerate(stack) if is_users(frame)]
    start = users[0] if users else 0
    kept = [
        (frame, line)
        for frame, line in stack[start:]
        if not frame.f_code.co_filename.startswith(_BESIDE)
    ]
    return kept or stack


def users_innermost(stack: Stack) -> int:
    """The position of the innermost frame of the user; that of the innermost one if none is."""
    users = [i for i, (frame, _) in enumerate(stack) if is_users(frame)]
    return users[-1] if users else len(stack) - 1


def place_of(stack: Stack) -> str:
    """The innermost line of the user in a stack, short; empty if it has no frames."""
    if not stack:
        return ""
    frame, line = stack[users_innermost(stack)]
    return f"{os.path.basename(place_name(frame.f_code.co_filename))}:{line}"


def table(views: Sequence[RankView], current: int | None) -> Iterable[str]:
    """A line for each rank, with a mark at the one that the debugger shows."""
    rows = [("rank", "function", "line", "")]
    for view in views:
        stack = without_echelon(view.stack)
        function = stack[users_innermost(stack)][0].f_code.co_name if stack else ""
        rows.append((str(view.rank), function, place_of(stack), view.doing))
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    for row, rank in zip(rows, [None, *(view.rank for view in views)], strict=True):
        mark = "->" if rank is not None and rank == current else "  "
        number, function, place = (f"{row[0]:>{widths[0]}}", row[1], row[2])
        yield f"{mark} {number}  {function:<{widths[1]}}  {place:<{widths[2]}}  {row[3]}".rstrip()
