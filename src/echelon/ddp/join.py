"""Ranks with different numbers of batches: who still has one, and what the others do meanwhile.

Inside ``join`` every communication of a step is announced: each rank says in one small all-gather
what it is about to do. A rank without batches keeps answering, and takes part in what the others
announce, until nobody announces anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import final

import torch

from echelon.comm.group import Group
from echelon.errors import StateError


class JoinStep(IntEnum):
    """What a rank is about to do."""

    JOINED = 0
    BACKWARD = 1
    BUFFERS = 2


_SAID = {
    JoinStep.JOINED: "has no batches left",
    JoinStep.BACKWARD: "reduces gradients",
    JoinStep.BUFFERS: "runs forward and needs buffers",
}


@final
class Rounds:
    """The announcements of one ``join``.

    Attributes:
        active: the ranks that had a batch when something was last announced.
    """

    def __init__(self, group: Group) -> None:
        self.active: tuple[int, ...] = ()
        self._group = group

    @property
    def first_active(self) -> int:
        """The lowest rank that still has batches: the source of what must be equal."""
        return self.active[0]

    def announce(self, step: JoinStep) -> tuple[int, ...]:
        """Say what this rank does next; returns the ranks that have a batch.

        Raises:
            StateError: they do not do the same.
        """
        said = self._exchange(step)
        self.active = tuple(rank for rank, what in enumerate(said) if what != JoinStep.JOINED)
        return self.active

    def shadow(self, actions: Mapping[JoinStep, Callable[[], None]]) -> None:
        """Take part in what the others announce, until no rank has a batch."""
        while True:
            said = self._exchange(JoinStep.JOINED)
            active = tuple(rank for rank, what in enumerate(said) if what != JoinStep.JOINED)
            if not active:
                return
            self.active = active
            actions[said[active[0]]]()

    def _exchange(self, step: JoinStep) -> list[JoinStep]:
        mine = torch.tensor([step], dtype=torch.int64, device=self._group.device)
        all_steps = torch.zeros(self._group.size, dtype=torch.int64, device=self._group.device)
        self._group.all_gather_single(all_steps, mine, label="announcement of join()")
        said = [JoinStep(number) for number in all_steps.tolist()]
        if len(set(said) - {JoinStep.JOINED}) > 1:
            rows = "\n".join(f"  rank {rank} {_SAID[what]}" for rank, what in enumerate(said))
            raise StateError(f"inside join() the ranks are at different points of a step:\n{rows}")
        return said
