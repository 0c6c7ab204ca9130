"""The end of a process: its exit code, and what it has printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from echelon.errors.message_text import is_open, message_of
from echelon.process.background_threads import run_in_background

EXIT_RESUMABLE: Final = 75  # EX_TEMPFAIL of sysexits.h: "try again later"


def exit_code_of(end: SystemExit) -> int:
    """The exit code of a process that Python ends so: the system keeps eight bits of a number.

    Example:
        >>> exit_code_of(SystemExit(3)), exit_code_of(SystemExit()), exit_code_of(SystemExit("no"))
        (3, 0, 1)
        >>> exit_code_of(SystemExit(256)), exit_code_of(SystemExit(-1))
        (0, 255)
    """
    if end.code is None:
        return 0
    if not isinstance(end.code, int):
        return 1
    return end.code & 0xFF if -(1 << 63) <= end.code < 1 << 63 else 0xFF  # no long of C holds it


def exit_text_of(end: SystemExit) -> str:
    """The text that Python prints at such an end; empty where there is only a number.

    Example:
        >>> exit_text_of(SystemExit("no data")), exit_text_of(SystemExit(3))
        ('no data', '')
    """
    return "" if end.code is None or isinstance(end.code, int) else message_of(end)


def end_now(code: int, *, flush_s: float | None = None) -> NoReturn:
    """End this process without exit handlers, with all that it has printed.

    Args:
        flush_s: seconds that printing may take, where another thread may hold a stream.
    """
    if flush_s is None:
        _flush()
    else:
        with suppress(RuntimeError):  # Python starts no more threads at its end
            run_in_background("echelon flush", _flush).join(flush_s)
    os._exit(code)


def _flush() -> None:
    for stream in filter(is_open, (sys.stdout, sys.stderr)):
        stream.flush()


def failing_process(handler: Callable[[], None]) -> Callable[[], None]:
    """An exit handler whose error ends the process with 1: Python prints it, and exits with 0."""

    def handle() -> None:
        try:
            handler()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            end_now(1)

    return handle
