"""Which units come next, from the order of the last step. Pure."""

from __future__ import annotations

from enum import Enum
from typing import final

__all__ = ["BackwardPrefetch", "Track"]


class BackwardPrefetch(Enum):
    """When the next unit of backward is gathered. Where ranks share memory a gather is free.

    The names are those of Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data
    Parallel", 2023, section 3.3.2.
    """

    PRE = "before the gradients of the unit before it: most overlap, one unit more is whole"
    POST = "after them"
    NONE = "when backward reaches it"


@final
class Track:
    """The order in which one pass needs units, and what that of the last one says is next.

    When the order changes, nothing is predicted until the next pass: a wrong guess would cost a
    gather for nothing.

    Example:
        >>> track = Track(depth=2)
        >>> [track.reached(u) for u in (3, 1, 2)]
        [[], [], []]
        >>> track.end()
        >>> [track.reached(u) for u in (3, 1, 2)]
        [[1, 2], [2], []]
        >>> track.end()
        >>> [track.reached(u) for u in (3, 2, 1)]
        [[1, 2], [], []]
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._last: list[int] = []
        self._now: list[int] = []
        self._is_lost = False

    def reached(self, u: int) -> list[int]:
        """Note that unit ``u`` is needed now; at most ``depth`` units that are needed next."""
        at = len(self._now)
        self._now.append(u)
        self._is_lost = self._is_lost or self._last[at : at + 1] != [u]
        return [] if self._is_lost else self._last[at + 1 : at + 1 + self.depth]

    def end(self) -> None:
        """The pass is over: its order predicts the next one."""
        self._last, self._now, self._is_lost = self._now, [], False
