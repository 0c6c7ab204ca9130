"""Gathers that begin before their unit is needed, in the order of the last step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from echelon.fsdp.policy import Options
from echelon.fsdp.prefetch import BackwardPrefetch, Track
from echelon.fsdp.unit import Unit

__all__ = ["Ahead"]

MOST = 2  # units ahead of need, where gathers are limited


@final
class Ahead:
    """Sees which units passes reach, and begins to gather what comes next.

    All ranks see the same, so all begin the same gathers.
    """

    def __init__(self, units: Sequence[Unit], options: Options) -> None:
        self._units, self._options = units, options
        self._forward = Track(options.forward_prefetch)
        self._backward = Track(0 if options.backward_prefetch is BackwardPrefetch.NONE else 1)
        self._after: dict[int, list[int]] = {}  # what comes after each unit of this backward

    def begin_forward(self) -> None:
        """An outermost forward begins."""
        self._forward.end()

    def in_forward(self, u: int) -> None:
        """Forward has reached a unit, which is whole."""
        self._begin(self._forward.reached(u))

    def in_backward(self, u: int) -> None:
        """Backward has reached a unit, which is whole."""
        self._after[u] = self._backward.reached(u)
        if self._options.backward_prefetch is BackwardPrefetch.PRE:
            self._begin(self._after[u])

    def complete(self, u: int) -> None:
        """All gradients of a unit are there, and it was released."""
        if self._options.backward_prefetch is BackwardPrefetch.POST:
            self._begin(self._after.get(u, ()))

    def end_backward(self) -> None:
        """Backward is over, or was aborted."""
        self._backward.end()
        self._after.clear()

    def _begin(self, units: Sequence[int]) -> None:
        for u in units:
            ahead = sum(unit.coming for unit in self._units)
            if self._options.limit_all_gathers and ahead >= MOST:
                return
            self._units[u].prefetch()
