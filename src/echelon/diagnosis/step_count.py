"""How many optimizer steps a rank has made, counted without its help."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from typing import Any, final
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from echelon.checks import whole

_current = threading.local()  # a simulated rank is a thread, and only it knows which one it is


@final
class Steps:
    """The optimizer steps of one rank.

    A rank may have several optimizers, which all take one step in each step of the training; so
    the one that has taken most of them tells the number.

    Args:
        note: called with each new number.
    """

    def __init__(self, note: Callable[[int], None] = lambda number: None) -> None:
        self._note = note
        self._first = 0
        self._number = 0
        self._taken: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()

    @property
    def number(self) -> int:
        """How many there were."""
        return self._number

    @number.setter
    def number(self, number: int) -> None:
        self._first = self._number = whole("step", number)
        self._taken.clear()
        self._note(self._number)

    def count(self) -> None:
        """Count the steps that optimizers take on this thread from now on."""
        _listen()
        _current.steps = self

    def _add(self, optimizer: Optimizer) -> None:
        taken = self._taken.get(optimizer, 0) + 1
        self._taken[optimizer] = taken
        if self._first + taken > self._number:
            self._number = self._first + taken
            self._note(self._number)


@cache  # one hook for all ranks of a process, however many worlds it has
def _listen() -> None:
    register_optimizer_step_post_hook(_took_step)


def _took_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    steps: Steps | None = getattr(_current, "steps", None)
    if steps is not None:
        steps._add(optimizer)
