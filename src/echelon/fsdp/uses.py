"""Forwards of a unit whose backward may still come.

[Note: one parameter, several accumulators]
Autograd adds up what the uses of a parameter give, and hands it over once. But where the parts of a
unit have another dtype or device than its whole parameters, torch gives a parameter a new
accumulator each time it is gathered. A unit that ran twice then gets two gradients of it in one
backward, and is complete only when the backward of every one of its forwards was there.
"""

from __future__ import annotations

import weakref
from typing import final

from echelon.fsdp.backward_pass import Pass

__all__ = ["Use", "Uses"]


@final
class Use:
    """One forward of a unit. Its graph holds it, so it is gone when no backward can come.

    Attributes:
        reached_by: the last pass that came to its outputs.
    """

    __slots__ = ("__weakref__", "reached_by")

    def __init__(self) -> None:
        self.reached_by: weakref.ref[Pass] | None = None


@final
class Uses:
    """The forwards of one unit that have a graph."""

    def __init__(self) -> None:
        self._alive: weakref.WeakSet[Use] = weakref.WeakSet()

    def add(self) -> Use:
        """A forward has made a graph."""
        use = Use()
        self._alive.add(use)
        return use

    def reach(self, use: Use, current: Pass) -> bool:
        """A pass has come to the outputs of ``use``; whether for the first time."""
        is_first = use.reached_by is None or use.reached_by() is not current
        use.reached_by = weakref.ref(current)
        return is_first

    def awaits(self, current: Pass) -> bool:
        """Whether a pass may still come to another forward."""
        return any(use.reached_by is None or use.reached_by() is not current for use in self._alive)
