"""Reads a file of actions that may be anything: a wrong path, a pipe, an archive, a disk."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import BinaryIO, NoReturn

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.action_text import MAX_NBYTES, line_starts, place_in

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read_file(path: Path) -> str:
    """The text of a file.

    Raises:
        ArgumentError: there is no such file, or it is no file of text, or it is too large.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no file")
            hint = (
                "; to read what a command prints, pipe it into this one and give - as the FILE"
                if stat.S_ISFIFO(mode)
                else "; give a file of text"
            )
            raise ArgumentError(f"{path} is {kind}{hint}")
        with path.open("rb") as file:
            return read_stream(file, str(path))
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        if isinstance(error, ArgumentError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(f"{path} cannot be read: {reason}") from error


def read_stream(file: BinaryIO, name: str) -> str:
    """The text of an open file, or of the standard input.

    Raises:
        ArgumentError: it is no text in UTF-8, or too large.
    """
    data = file.read(MAX_NBYTES + 1)
    if len(data) > MAX_NBYTES:
        raise ArgumentError(
            f"{name} is larger than {MAX_NBYTES // 2**20} MiB; give one step of the schedule, "
            "which repeats"
        )
    if data.startswith(_UTF16_MARKS):
        raise ArgumentError(f"{name} is text in UTF-16; save it in UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse_binary(name, data, error.start)
    zero = data.find(b"\0")
    if zero >= 0:
        _refuse_binary(name, data, zero)
    return text.replace("\r\n", "\n")


def _refuse_binary(name: str, data: bytes, offset: int) -> NoReturn:
    before = data[:offset].decode("utf-8")
    place = place_in(line_starts(before), len(before))
    raise ArgumentError(
        f"{name} is no text: {place}: byte {offset} is 0x{data[offset]:02x}; give a CSV or a text "
        "file in UTF-8"
    )
