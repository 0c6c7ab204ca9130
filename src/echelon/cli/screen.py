"""What rank 0 writes, on the screen while it runs."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO, final

__all__ = ["Screen"]

HOLD_S = 15.0  # how long a traceback of rank 0 is held back: it may be the end of the run


@final
class Screen:
    """Copies what rank 0 of the current attempt writes to files onto the standard streams.

    Args:
        log_dir: of the run.
        live: rank 0 writes to our standard output itself.
    """

    def __init__(self, log_dir: Path, live: bool) -> None:
        self._log_dir, self._live = log_dir, live
        self._attempt = 0
        self._tails = self._open_tails()

    def show(self) -> None:
        """Copy what is new."""
        for tail in self._tails:
            tail.show()

    def close_attempt(self, failed: bool) -> None:
        """Copy the rest of this attempt, and go on with the next one."""
        for tail in self._tails:
            tail.close(failed)
        self._attempt += 1
        self._tails = self._open_tails()

    def _open_tails(self) -> list[_Tail]:
        rank_0 = f"*/attempt_{self._attempt}/0"
        tails = [_Tail(self._log_dir, f"{rank_0}/stderr.log", sys.stderr)]
        if not self._live:
            tails.append(_Tail(self._log_dir, f"{rank_0}/stdout.log", sys.stdout))
        return tails


class _Tail:
    """Copies a file onto a stream, as it grows.

    A traceback may be the end of the run, whose cause is told at the end by its first line; so
    it is held back for a moment, and dropped if the run has failed.
    """

    def __init__(self, log_dir: Path, pattern: str, stream: TextIO) -> None:
        self._log_dir, self._pattern, self._stream = log_dir, pattern, stream
        self._file: TextIO | None = None
        self._held = ""
        self._held_since = 0.0

    def show(self) -> None:
        """Copy what is new, up to a traceback."""
        text = self._held + self._read()
        start = text.find("Traceback (most recent call last)")
        if start < 0:
            shown, self._held = text, ""
        else:
            if not self._held:
                self._held_since = time.monotonic()
            shown, self._held = text[:start], text[start:]
            if time.monotonic() - self._held_since > HOLD_S:
                shown, self._held = text, ""
        self._write(shown)

    def close(self, failed: bool) -> None:
        """Copy the rest; what is held back only if the run has not failed."""
        self.show()
        if not failed:
            self._write(self._held)
        if self._file is not None:
            self._file.close()

    def _read(self) -> str:
        """What the file has got since the last time; it may not exist yet."""
        if self._file is None:
            found = list(self._log_dir.glob(self._pattern))
            if not found:
                return ""
            self._file = open(found[0], encoding="utf-8", errors="replace")  # noqa: SIM115
        return self._file.read()

    def _write(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()
