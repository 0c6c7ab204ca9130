"""Room for large data that does not lie in a window: two halves a rank, mapped by all."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from echelon.world.shm.area import Area
from echelon.world.shm.segment import Segment
from echelon.world.work import Ticket

__all__ = ["HALF_NBYTES", "Staging", "share_segments"]

# A piece this large amortises a round (some 20 µs), and still lies in the last-level cache when it
# is read.
HALF_NBYTES = 1 << 22


def share_segments(
    area: Area, ticket: Ticket, mine: Segment, *, populate: bool, timeout: float
) -> list[Segment]:
    """Give each rank's segment to all ranks: the segments in rank order. Takes two rounds."""
    note = torch.frombuffer(bytearray(mine.token.encode().ljust(64)), dtype=torch.uint8)
    slots = area.parts(torch.uint8, note.numel())
    slots[area.rank].copy_(note)
    area.next_round(ticket, timeout)
    tokens = [bytes(slot.numpy()).decode().strip() for slot in slots]
    segments = [
        mine if rank == area.rank else Segment.open(token, populate=populate)
        for rank, token in enumerate(tokens)
    ]
    area.next_round(ticket, timeout)  # all have opened it
    mine.unpublish()
    return segments


@final
class Staging:
    """Two halves of ``HALF_NBYTES`` on each rank, used in turn like the slots of ``Area``."""

    def __init__(self, area: Area, ticket: Ticket, timeout: float) -> None:
        self._area = area
        segment = Segment.create(
            2 * HALF_NBYTES, what="staging for large collectives", reserve=True
        )
        self._halves = [
            [one.tensor(half * HALF_NBYTES, HALF_NBYTES) for half in (0, 1)]
            for one in share_segments(area, ticket, segment, populate=True, timeout=timeout)
        ]

    def parts(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The halves of all ranks in the coming round, as 1D tensors of ``numel`` elements."""
        half = (self._area.round + 1) & 1
        nbytes = numel * dtype.itemsize
        return [halves[half].narrow(0, 0, nbytes).view(dtype) for halves in self._halves]
