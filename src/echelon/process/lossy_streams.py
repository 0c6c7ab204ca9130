"""Standard streams that lose text where their file cannot take it, and raise nothing.

What a job prints goes to files. A disk that is full, or over its quota, is no reason to end a
training in a ``print``. Pipes and terminals stay as they are: whoever closes one means it.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast, final

_LOST_MODE = 0o400  # of a file that its writer holds open


def lose_rather_than_raise(*, marks: bool = False) -> None:
    """Let standard output and error of this process lose what their files cannot take.

    A stream that somebody has replaced, or that is no regular file, stays as it is.

    Args:
        marks: take the permission to write from a file that has lost something, as
            ``has_lost`` reads it. For files that are ours.
    """
    sys.stdout = _lossy(sys.stdout, sys.__stdout__, marks)
    sys.stderr = _lossy(sys.stderr, sys.__stderr__, marks)


def has_lost(path: str | os.PathLike[str]) -> bool:
    """Whether a file was marked because it has not taken all that was written."""
    return stat.S_IMODE(os.stat(path).st_mode) == _LOST_MODE


@final
class _LossyFile(io.FileIO):
    """A file that takes everything, and keeps what it can."""

    def __init__(self, fd: int, name: str, on_loss: Callable[[int], object]) -> None:
        super().__init__(fd, "w", closefd=False)
        self.name = name
        self._on_loss = on_loss

    def write(self, data: Any, /) -> int:
        """Write what fits."""
        view = memoryview(data).cast("B")
        num_written = 0
        try:
            while num_written < len(view):
                num_written += super().write(view[num_written:]) or 0
        except OSError:  # the disk is full, over its quota, broken or gone
            self._on_loss(self.fileno())
        return len(view)


def _lossy(stream: TextIO, original: TextIO | None, marks: bool) -> TextIO:
    if stream is None or stream is not original:  # None: the process was started without it
        return stream
    fd = stream.fileno()
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return stream
    stream.flush()
    buffer = stream.buffer
    raw = _LossyFile(fd, stream.name, _mark if marks else _leave)
    lossy = io.TextIOWrapper(
        cast("io.BufferedWriter", raw if isinstance(buffer, io.FileIO) else io.BufferedWriter(raw)),
        encoding=stream.encoding,
        errors=stream.errors,
        newline="\n",
        line_buffering=bool(stream.line_buffering),
        write_through=isinstance(buffer, io.FileIO),
    )
    vars(lossy)["mode"] = "w"
    return lossy


def _mark(fd: int) -> None:
    os.fchmod(fd, _LOST_MODE)


def _leave(fd: int) -> None:
    """It is the user's file."""
