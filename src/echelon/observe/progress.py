"""The progress of a run for a person who watches: live on a terminal, plain lines in a pipe."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from echelon import checks
from echelon.page import bytes_text


def duration_text(seconds: float) -> str:
    """``seconds`` as a short text.

    Example:
        >>> [duration_text(seconds) for seconds in (7.4, 65, 7260)]
        ['7s', '1m 05s', '2h 01m']
    """
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    return f"{whole // 3600}h {whole % 3600 // 60:02d}m"


_BAR = 20  # characters
_BAR_WIDTH = _BAR + 8  # with the percentage and the spaces between
_WITHOUT_BAR = (TextColumn("{task.description}", markup=False),)
_WITH_BAR = (BarColumn(bar_width=_BAR), TaskProgressColumn(), *_WITHOUT_BAR)


def _short(count: float) -> str:
    """``count`` as a text of at most four characters and a letter."""
    for power, letter in ((3, "G"), (2, "M"), (1, "k")):
        if count >= 1000**power:
            return f"{count / 1000**power:.1f}{letter}"
    return f"{count:.0f}"


class Progress:
    """Shows loss, tokens per second, memory and time left. A context manager; for one rank only.

    On a terminal there is one live line. If the terminal is narrow, the line is without the bar,
    then also without memory, then with shorter words; it always has the speed and the time left.
    In a pipe or a file there is one plain line every ``interval_s`` and one for the last step.

    Args:
        total_steps: the number of steps of the run.
        unit: the unit of the loss.
        console: where to write; None: standard output.
        interval_s: seconds between plain lines.
        clock: a function that returns the time in seconds.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        unit: str = "",
        console: Console | None = None,
        interval_s: float = 5.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.total_steps = checks.integer("total_steps", total_steps, low=1)
        checks.instance("unit", unit, str)
        checks.instance("console", console, Console, or_none=True)
        checks.function("clock", clock, "nothing, which gives seconds")
        self._unit = unit
        # A pipe has no width; a line must not be folded at 80 columns there.
        self._console = console or Console(
            file=sys.stdout, soft_wrap=True, highlight=False, markup=False, emoji=False
        )
        self._interval_s = checks.number("interval_s", interval_s, 0.0, math.inf)
        self._clock = clock
        self._shown_s = -float("inf")
        self._shape = (0, 0)  # the width of the terminal, and how many forms were too long for it
        self._bar: Bar | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._bar = Bar(*_WITH_BAR, console=self._console, refresh_per_second=4)
            self._task = self._bar.add_task("", total=self.total_steps)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(
        self, step: int, *, loss: float, tokens_per_s: float, nbytes: int, left_s: float
    ) -> None:
        """Show the state after ``step`` steps."""
        unit = f" {self._unit}" if self._unit else ""
        done, left = f"{step}/{self.total_steps}", duration_text(left_s)
        text = (
            f"step {done}  loss {loss:.3f}{unit}"
            f"  {tokens_per_s:,.0f} tokens/s  {bytes_text(nbytes)}  {left} left"
        )
        if self._bar is not None:
            forms = (
                text,
                text,
                f"step {done}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  {left} left",
                f"{done}  {loss:.3f}  {tokens_per_s:,.0f} tok/s  {left} left",
                f"{done} {loss:.2f} {_short(tokens_per_s)}/s {left}",
            )
            form = self._form([len(form) for form in forms])
            self._bar.columns = _WITH_BAR if form == 0 else _WITHOUT_BAR
            self._bar.update(
                self._task, completed=step, total=self.total_steps, description=forms[form]
            )
            return
        now = self._clock()
        if now - self._shown_s >= self._interval_s or step >= self.total_steps:
            self._shown_s = now
            self._console.print(text)

    def _form(self, lengths: Sequence[int]) -> int:
        """Which form of the line to show; the first is with the bar.

        A number that becomes a digit longer and shorter must not make the bar come and go, so a
        form that was too long once is not taken again before the terminal changes.
        """
        width, first = self._shape
        if width != self._console.width:
            width, first = self._console.width, 0
        while first < len(lengths) - 1 and lengths[first] + _BAR_WIDTH * (first == 0) > width:
            first += 1
        self._shape = width, first
        return first

    def note(self, text: str) -> None:
        """Print a line that stays above the live one."""
        self._console.print(text)
