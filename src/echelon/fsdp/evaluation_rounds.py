"""Evaluation where some ranks have no rows: they take part in the unshards of the others.

Inside ``join`` a forward is announced in one small all-reduce. A rank that has left the block keeps
answering, and runs a forward that calls no module, until no rank announces one.

A backward is refused: the optimizer of a rank without batches would not step its shards, which
every rank needs.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import final

import torch

from echelon.errors import StateError
from echelon.fsdp.hybrid_groups import HybridGroups


class NextPass(IntEnum):
    """What a rank is about to do; the highest of all ranks counts."""

    LEFT = 0
    EVALUATES = 1
    TRAINS = 2


@final
class EvaluationRounds:
    """The announcements of one ``join``."""

    def __init__(self, groups: HybridGroups) -> None:
        self._groups = groups

    def announce_forward(self) -> None:
        """A forward begins. Raises StateError on all ranks if one of them makes a graph."""
        self._exchange(NextPass.TRAINS if torch.is_grad_enabled() else NextPass.EVALUATES)

    def shadow(self, forward: Callable[[], object]) -> None:
        """Take part in the forwards of the others, until no rank has one."""
        while self._exchange(NextPass.LEFT) is not NextPass.LEFT:
            forward()

    def _exchange(self, step: NextPass) -> NextPass:
        most = torch.tensor([step], dtype=torch.int64, device=self._groups.shard.device)
        self._groups.all_reduce(most, "max", "announcement of join()")
        if most.item() == NextPass.TRAINS:
            raise StateError(
                "FSDP.join() is for evaluation under torch.no_grad(), and a rank runs a forward "
                "that makes a graph: every rank steps the optimizer for its own shards, so in "
                "training every rank needs a batch in every step. Let ec.ResumableSampler deal "
                "the samples, or train the model in ec.DDP, whose join() allows it"
            )
        return NextPass(int(most.item()))
