"""The end of a process: its exit code, and what it has printed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NoReturn

from echelon.process.background_threads import run_in_background

EXIT_RESUMABLE: Final = 75  # EX_TEMPFAIL of sysexits.h: "try again later"


def exit_code_of(end: SystemExit) -> int:
    """The exit code that Python gives; where that is told by a text, print the text as it does.

    Example:
        >>> exit_code_of(SystemExit(3)), exit_code_of(SystemExit())
        (3, 0)
    """
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


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
    sys.stdout.flush()
    sys.stderr.flush()


def failing_process(handler: Callable[[], None]) -> Callable[[], None]:
    """An exit handler whose error ends the process with 1: Python prints it, and exits with 0."""

    def handle() -> None:
        try:
            handler()
        except BaseException as error:
            sys.excepthook(type(error), error, error.__traceback__)
            end_now(1)

    return handle
