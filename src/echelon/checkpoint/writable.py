"""Which memory this process may write: a load asks before it changes anything.

A tensor may lie in a file that is mapped for reading only (``numpy.memmap(mode="r")``). Torch does
not know; the first write to it fails, when half of a model may have been written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import final

from torch import Tensor

from echelon.errors import ArgumentError

_MAPS = Path("/proc/self/maps")


def check_writable(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse tensors, by name, in memory that cannot be written. Where Linux does not say, all can.

    Raises:
        ArgumentError: names the first.
    """
    pages: _Pages | None = None
    for name, tensor in tensors:
        if tensor.numel() == 0:
            continue
        pages = _Pages() if pages is None else pages
        if pages.is_read_only(tensor.data_ptr()):
            raise ArgumentError(
                f"{name!r} lies in memory that is mapped for reading only, such as a file opened "
                "with mode='r', so nothing can be loaded into it; nothing was changed. Give it "
                "memory of its own: tensor.clone()"
            )


@final
class _Pages:
    """The ranges of memory that this process may read and not write."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        text = _MAPS.read_text() if _MAPS.exists() else ""
        for line in text.splitlines():
            place, rights = line.split(maxsplit=2)[:2]
            if "w" not in rights:
                start, stop = place.split("-")
                self._starts.append(int(start, 16))
                self._stops.append(int(stop, 16))

    def is_read_only(self, address: int) -> bool:
        """Whether what lies at ``address`` cannot be written; False if nothing is known there."""
        i = bisect_right(self._starts, address) - 1
        return i >= 0 and address < self._stops[i]
