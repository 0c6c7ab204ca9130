"""Where the debugger of ranks speaks with its user."""

from __future__ import annotations

import pdb
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from echelon.errors import DebuggerQuit
from echelon.launch.rank_lines import WholeLines


class DebuggerHost:
    """The standard streams of the process: a terminal, a pipe, or a cell of a notebook."""

    def enter(self, debugger: pdb.Pdb) -> None:
        """Called before the debugger asks for commands."""

    def leave(self, debugger: pdb.Pdb) -> None:
        """Called before the program goes on to its next breakpoint, or to its end."""

    def output(self) -> TextIO:
        """The stream for what the debugger prints, which is no line of a rank."""
        return sys.stdout.unmarked if isinstance(sys.stdout, WholeLines) else sys.stdout

    def quit_error(self, rank: int | None, place: str) -> BaseException:
        """What a rank raises whose user ends the run."""
        return DebuggerQuit(rank, place)

    def ends_run(self, error: BaseException) -> bool:
        """Whether it was the user who has ended the run."""
        return isinstance(error, KeyboardInterrupt | DebuggerQuit)


_hosts: list[DebuggerHost] = [DebuggerHost()]


def current_host() -> DebuggerHost:
    """The host of this process now."""
    return _hosts[-1]


@contextmanager
def hosted_by(host: DebuggerHost) -> Iterator[None]:
    """Let the debugger speak through ``host`` in the body."""
    _hosts.append(host)
    try:
        yield
    finally:
        _hosts.remove(host)
