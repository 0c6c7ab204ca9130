"""Rows of text that a program writes over, as progress bars do, and which state of them is shown.

A bar goes back to the start of its row (``\\r``) and writes it again, many times in a second; one
below another moves down and up (``\\n``, ``ESC [A``). A terminal shows the last state of each row.
In a file or a pipe each state would be a line.
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from typing import TextIO, final

_SIGNS = re.compile(r"(\r\n|\r|\n|\x1b\[\d*[AK])")
_BEGUN = re.compile(r"\x1b(?:\[\d*)?\Z|\r\Z")  # the rest may come with the next text


@final
class WrittenRows:
    """The rows from the one that is written now on; those above are finished. Pure.

    Example:
        >>> rows = WrittenRows()
        >>> rows.take("loss 1\\n\\r 10%\\r 20%"), rows.open
        ('loss 1\\n', ' 20%')
        >>> rows.take("\\r100%\\n")
        '100%\\n'
    """

    def __init__(self) -> None:
        self._rows = [_OverwrittenRow()]
        self._row = self._column = 0
        self._begun = ""

    @property
    def open(self) -> str:
        """The row that has no end yet, in its last state."""
        return self._rows[self._row].text

    @property
    def is_written_over(self) -> bool:
        """Whether the open row has not only grown."""
        return self._rows[self._row].is_written_over

    def take(self, text: str) -> str:
        """The rows that ``text`` finishes, each in its last state and with an end of line."""
        text = self._begun + text
        begun = _BEGUN.search(text)
        self._begun = "" if begun is None else begun[0]
        for part in _SIGNS.split(text.removesuffix(self._begun)):
            self._write(part)
        finished = "".join(f"{row.shown()}\n" for row in self._rows[: self._row])
        del self._rows[: self._row]
        self._row = 0
        return finished

    def end(self) -> str:
        """What is left, as rows; nothing if there is nothing to see in it."""
        rows = [row.shown() for row in self._rows]
        self._rows, self._row, self._column, self._begun = [_OverwrittenRow()], 0, 0, ""
        while rows and not rows[-1].strip():
            rows.pop()
        return "".join(f"{row}\n" for row in rows)

    def _write(self, part: str) -> None:
        row = self._rows[self._row]
        if part in ("\n", "\r\n"):
            self._row, self._column = self._row + 1, 0
            if self._row == len(self._rows):
                self._rows.append(_OverwrittenRow())
        elif part == "\r":
            self._column, row.is_written_over = 0, True
        elif part.startswith("\x1b[") and part.endswith("A"):
            self._row = max(0, self._row - int(part[2:-1] or 1))
            self._rows[self._row].is_written_over = True
        elif part.startswith("\x1b[") and part.endswith("K"):
            row.text = "" if part[2:-1] == "2" else row.text[: self._column]
        elif part:
            end = self._column + len(part)
            row.text = row.text[: self._column].ljust(self._column) + part + row.text[end:]
            self._column = end


@dataclass(slots=True)
class _OverwrittenRow:
    text: str = ""
    is_written_over: bool = False

    def shown(self) -> str:
        """The text; of a bar without the spaces that have erased more."""
        return self.text.rstrip() if self.is_written_over else self.text


@final
class FinishedRows:
    """Writes rows to a file or a pipe: each in its last state, when it is finished."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._rows = stream, WrittenRows()
        self._shown = ""  # of the open row, which is written at once as long as it only grows

    def write(self, text: str) -> None:
        """Write the rows that are finished, and what is certain of the open one."""
        finished = self._rows.take(text)
        if finished and self._shown:
            same = finished.startswith(self._shown)
            finished = finished.removeprefix(self._shown) if same else f"\n{finished}"
            self._shown = ""
        self._stream.write(finished)
        if not self._rows.is_written_over:
            self._stream.write(self._rows.open.removeprefix(self._shown))
            self._shown = self._rows.open

    def end(self) -> None:
        """Write what is left."""
        rest = self._rows.end()
        if self._shown:
            same = rest.startswith(self._shown)
            rest = rest.removeprefix(self._shown).removesuffix("\n") if same else f"\n{rest}"
        self._shown = ""
        self._stream.write(rest)

    def flush(self) -> None:
        """Have the stream written."""
        self._stream.flush()


@final
class AsWritten:
    """Writes everything to a terminal as it comes: the rows of one rank need nobody's help."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        """Write it."""
        self._stream.write(text)

    def end(self) -> None:
        """Nothing is left."""

    def flush(self) -> None:
        """Have the stream written."""
        self._stream.flush()


@final
class OpenRows:
    """The rows of all ranks that are written over, below everything else on a terminal.

    Args:
        stream: the terminal; None: there is none, and nothing is shown before it is finished.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self._rows: dict[str, str] = {}
        self._num_drawn = 0

    def show(self, prefix: str, row: str) -> None:
        """Show the last state of a row of a rank; empty: of none."""
        if self._stream is None or self._rows.get(prefix, "") == row:
            return
        self.hide()
        self._rows.pop(prefix, None)
        if row:
            self._rows[prefix] = row
        self.draw()

    def hide(self) -> None:
        """Remove the rows from the terminal, where something else is to be written."""
        if self._stream is not None and self._num_drawn:
            self._stream.write("\r\x1b[K" + "\x1b[A\x1b[K" * (self._num_drawn - 1))
            self._stream.flush()
            self._num_drawn = 0

    def draw(self) -> None:
        """Write the rows again, each on one line of the terminal."""
        if self._stream is None or not self._rows:
            return
        width = shutil.get_terminal_size().columns - 1
        rows = [f"{prefix}{row}"[:width] for prefix, row in sorted(self._rows.items())]
        self._stream.write("\n".join(rows))
        self._stream.flush()
        self._num_drawn = len(rows)


@final
class MarkedRows:
    """Writes the finished rows of one rank, each with a prefix, and shows the open one.

    Args:
        stream: where they are written.
        prefix: of each.
        open_rows: those of all ranks; None: none is shown.
    """

    def __init__(self, stream: TextIO, prefix: str, open_rows: OpenRows | None = None) -> None:
        self._stream, self._prefix = stream, prefix
        self._open_rows = OpenRows(None) if open_rows is None else open_rows
        self._rows = WrittenRows()

    def write(self, text: str) -> None:
        """Write the rows that are finished."""
        finished = self._rows.take(text)
        if finished:
            self._open_rows.show(self._prefix, "")
        self._write(finished)
        self._open_rows.show(self._prefix, self._rows.open if self._rows.is_written_over else "")

    def end(self) -> None:
        """Write what is left."""
        rest = self._rows.end()
        self._open_rows.show(self._prefix, "")
        self._write(rest)

    def flush(self) -> None:
        """Have the stream written."""
        self._stream.flush()

    def _write(self, rows: str) -> None:
        if rows:
            self._open_rows.hide()
            self._stream.write("".join(f"{self._prefix}{row}\n" for row in rows[:-1].split("\n")))
            self._stream.flush()
            self._open_rows.draw()


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream shows what signs for a terminal say."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"
