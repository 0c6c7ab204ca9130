"""Breakpoints of ``b``, which stop each rank that comes to their line, whoever has set them.

Python traces threads, and a thread can only be traced by itself. So a rank looks for breakpoints
that are new to it when its turn begins.
"""

from __future__ import annotations

import sys
from pdb import Pdb
from types import FrameType
from typing import TYPE_CHECKING, Any

# Of all debuggers of ranks: lines by file, and commands by the number of a breakpoint.
_breaks: dict[str, list[int]] = {}
_commands: dict[str, dict[int, Any]] = {}

if TYPE_CHECKING:
    _Base = Pdb
else:
    _Base = object


class SharedBreakpoints(_Base):
    """Gives all debuggers of its class the same breakpoints. Comes before ``Pdb``."""

    _known_breaks: dict[str, list[int]] = {}  # noqa: RUF012  # replaced, and never changed

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in ("commands", "commands_doprompt", "commands_silent"):
            if hasattr(self, name):  # later versions of Python have only the first
                setattr(self, name, _commands.setdefault(name, {}))

    @property
    def breaks(self) -> dict[str, list[int]]:
        """The lines that have breakpoints, by file."""
        return _breaks

    @breaks.setter
    def breaks(self, breaks: dict[str, list[int]]) -> None:
        _breaks.clear()
        _breaks.update(breaks)

    def follow_breaks(self, frame: FrameType | None) -> None:
        """Let the calling thread stop at the breakpoints that there are now.

        Args:
            frame: its innermost one.
        """
        if _breaks == self._known_breaks:
            return
        self._known_breaks = {file: list(lines) for file, lines in _breaks.items()}
        if sys.gettrace() is None:
            self.set_trace(frame)
            self.set_continue()
        while frame is not None and sys.gettrace() == self.trace_dispatch:
            frame.f_trace = self.trace_dispatch
            frame = frame.f_back
