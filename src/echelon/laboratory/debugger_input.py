"""Lines that a user types for the debugger of a simulated rank.

The main thread reads them, if it waits for the ranks: there a Ctrl-C arrives, and the kernel of a
notebook answers no other thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import IO, Any

from echelon.process.main_thread import in_main_thread


def read_line(prompt: str, output: IO[str], is_over: Callable[[], bool]) -> str:
    """One line without its end.

    Args:
        prompt: printed before it.
        output: where.
        is_over: whether the run has been interrupted, so that nobody answers any more.

    Raises:
        EOFError: there are no more lines.
        Exception: whatever ``input`` raises, as in a notebook that cannot be asked.
        KeyboardInterrupt: Ctrl-C, which ends the main thread's wait for the ranks, too.
    """
    lines: list[str] = []
    errors: list[Exception] = []

    def read() -> None:
        if is_over():
            return
        try:
            with redirect_stdout(output):
                lines.append(input(prompt))
        except Exception as error:  # raised below, where the line is wanted
            errors.append(error)

    output.flush()
    if not is_over() and not in_main_thread(read):
        read()  # the ranks were started by another thread
    if lines:
        return lines[0]
    raise errors[0] if errors else KeyboardInterrupt  # its own: the main thread raises another


@contextmanager
def completing(complete: Callable[[str, int], Any]) -> Iterator[None]:
    """Let the tabulator complete words by this function in the body, where a terminal can."""
    try:
        import readline
    except ImportError:
        yield
        return
    before = readline.get_completer()
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        readline.set_completer(before)
