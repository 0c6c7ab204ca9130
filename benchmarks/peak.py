"""The memory that a process takes at most while something runs, with shared pages counted once."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Self

__all__ = ["PeakMemory"]

PERIOD_S = 0.005


class PeakMemory:
    """Watches this process from a thread: what it takes at most, beyond what it had at the start.

    A page that several processes map counts as a share for each (proportional set size), so that
    shared memory is not counted once for every rank that can see it.

    Attributes:
        mib: the largest growth seen.
    """

    def __init__(self) -> None:
        self.mib = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak memory", daemon=True)
        self._start_mib = 0.0

    def __enter__(self) -> Self:
        self._start_mib = _mib()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(PERIOD_S):
            self.mib = max(self.mib, _mib() - self._start_mib)


def _mib() -> float:
    """The proportional set size of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("/proc/self/smaps_rollup has no line 'Pss:'")
