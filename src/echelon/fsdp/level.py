"""How many bytes of something are held, and the most that were."""

from __future__ import annotations

from typing import final


@final
class Level:
    """Live and peak bytes of one category.

    Example:
        >>> level = Level()
        >>> for nbytes in (400, 200, -400):
        ...     level.grow(nbytes)
        >>> level.live, level.peak
        (200, 600)
    """

    __slots__ = ("live", "peak")

    def __init__(self) -> None:
        self.live = self.peak = 0

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes``, which is negative when memory is given back."""
        self.live += nbytes
        if self.live > self.peak:
            self.peak = self.live
