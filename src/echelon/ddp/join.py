"""Ranks with different numbers of batches: which ranks still have one, and what the others do.

Inside ``join`` every communication of a step is announced: each rank says in one small all-gather
what it is about to do. A rank without batches keeps answering, and takes part in what the others
announce, until no rank announces anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import final

import torch

from echelon.comm.group import Group
from echelon.diagnosis import rank_time
from echelon.errors import StateError


class JoinStep(IntEnum):
    """What a rank is about to do."""

    JOINED = 0
    BACKWARD = 1
    BUFFERS = 2


_SENTENCE = {
    JoinStep.JOINED: "has no batches left",
    JoinStep.BACKWARD: "reduces gradients",
    JoinStep.BUFFERS: "runs forward and needs buffers",
}


@final
class Rounds:
    """The announcements of one ``join``.

    Attributes:
        active: the ranks that had a batch at the last announcement.
    """

    def __init__(self, group: Group) -> None:
        self.active: tuple[int, ...] = ()
        self._group = group
        if (rows := rank_time.rows()) is not None:
            rows.allow_unequal()

    @property
    def first_active(self) -> int:
        """The lowest rank that still has batches; buffers and parameters are sent from it."""
        return self.active[0]

    def announce(self, step: JoinStep) -> tuple[int, ...]:
        """Announce what this rank does next, and return the ranks that have a batch."""
        self.active = _active(self._exchange(step))
        return self.active

    def shadow(self, actions: Mapping[JoinStep, Callable[[], None]]) -> None:
        """Take part in what the others announce, until no rank has a batch."""
        while True:
            steps = self._exchange(JoinStep.JOINED)
            if not (active := _active(steps)):
                return
            self.active = active
            actions[steps[active[0]]]()

    def _exchange(self, step: JoinStep) -> list[JoinStep]:
        announcement = torch.tensor([step], dtype=torch.int64, device=self._group.device)
        all_steps = torch.zeros(self._group.size, dtype=torch.int64, device=self._group.device)
        self._group.all_gather_single(all_steps, announcement, label="announcement of join()")
        steps = [JoinStep(number) for number in all_steps.tolist()]
        if len(set(steps) - {JoinStep.JOINED}) > 1:
            rows = "\n".join(f"  rank {rank} {_SENTENCE[s]}" for rank, s in enumerate(steps))
            raise StateError(f"inside join() the ranks are at different points of a step:\n{rows}")
        return steps


def _active(steps: Sequence[JoinStep]) -> tuple[int, ...]:
    """The ranks that have a batch."""
    return tuple(rank for rank, step in enumerate(steps) if step != JoinStep.JOINED)
