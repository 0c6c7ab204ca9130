"""In which order the gradients of units leave: the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch

from echelon.fsdp.ranks import Ranks

__all__ = ["Order"]


@final
class Order:
    """At first the opposite of forward's, then that of the first rank's first backward.

    Attributes:
        units: the order.
    """

    def __init__(self, num_units: int) -> None:
        self.units = [*range(num_units - 1, 0, -1), 0]  # the root's gradients come last
        self._seen: list[int] | None = None
        self._is_agreed = False

    def note(self, completed: Sequence[int]) -> None:
        """Remember the units of the first backward, in the order in which they were complete."""
        if self._seen is None:
            self._seen = [*completed, *(u for u in self.units if u not in completed)]

    def agree(self, ranks: Ranks) -> None:
        """Once, before a forward: take the order that the first rank has noted, on all ranks."""
        if self._seen is None or self._is_agreed:
            return
        self._is_agreed = True
        order = torch.tensor(self._seen, device=ranks.shard.device)
        ranks.broadcast(order, "order of units")
        self.units = order.tolist()
