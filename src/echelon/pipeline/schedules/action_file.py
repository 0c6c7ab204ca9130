"""Reads a file of actions that may be anything: a wrong path, a pipe, an archive, a disk."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.action_lists import MAX_NBYTES, place_in
from echelon.process.plain_file import open_plain

_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def read_file(path: Path) -> str:
    """The text of a file.

    Raises:
        ArgumentError: there is no such file, or it is no file of text, or it is too large.
    """
    try:
        with open_plain(path, follows=True) as file:
            return read_stream(file, str(path))
    except (OSError, ValueError) as error:  # a path with a zero byte is a ValueError
        if isinstance(error, ArgumentError):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        raise ArgumentError(
            f"{path} cannot be read: {reason}; give a file of text, or pipe what a command prints "
            "into this one and give - as the FILE"
        ) from error


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
        text, wrong = data.decode("utf-8"), data.find(b"\0")
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        before = data[:wrong].decode("utf-8")
        raise ArgumentError(
            f"{name} is no text: {place_in(before, len(before))}: byte {wrong} is "
            f"0x{data[wrong]:02x}; give a CSV or a text file in UTF-8"
        )
    return text.replace("\r\n", "\n")
