"""What simulated ranks print: a stream for all their threads, whose lines do not mix."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from echelon.launch.rank_output import rank_prefix
from echelon.launch.written_rows import WrittenRows
from echelon.process.this_rank import here


class WholeLines(io.TextIOBase):
    """A stream for many threads that writes whole lines to another.

    Args:
        stream: where they are written.
        tee: whether each line shows the rank that prints it.
    """

    def __init__(self, stream: TextIO, tee: bool) -> None:
        self._stream = stream
        self._tee = tee
        self._open = threading.local()  # what a thread wrote since its last newline
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Write up to the last newline, and keep the rest for later."""
        whole, newline, rest = (self._kept() + text).rpartition("\n")
        self._open.text = rest
        if newline:
            with self._lock:
                self._stream.write(self._marked(whole) + newline)
        return len(text)

    def flush(self) -> None:
        """Write what this thread has kept; where lines show their ranks, whole lines only."""
        kept = ""
        if not self._tee:
            kept, self._open.text = self._kept(), ""
        with self._lock:
            self._stream.write(kept)
            self._stream.flush()

    def end(self) -> None:
        """Write what a rank has kept that ends."""
        if self._tee and self._kept():
            self.write("\n")
        self.flush()

    @property
    def unmarked(self) -> TextIO:
        """The stream underneath, for what no rank prints."""
        return self._stream

    def isatty(self) -> bool:
        """Whether a person watches."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The file underneath."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """Of the stream underneath."""
        return self._stream.encoding

    def _marked(self, text: str) -> str:
        """``text`` with the rank that prints it before each line, if that is wanted."""
        rank = here.printed_as
        if rank is None or not self._tee:
            return text
        prefix = rank_prefix(rank)
        rows = WrittenRows().take(f"{text}\n")[:-1]  # each in its last state
        return "\n".join(f"{prefix}{line}" for line in rows.split("\n"))

    def _kept(self) -> str:
        return getattr(self._open, "text", "")


@contextmanager
def printing_as(rank: int) -> Iterator[None]:
    """Mark what this thread prints in the block as lines of ``rank``."""
    before = here.printed_as
    here.printed_as = rank
    try:
        yield
    finally:
        here.printed_as = before
