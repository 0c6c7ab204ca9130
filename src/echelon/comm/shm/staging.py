"""Room for large data that does not lie in a window: two halves a rank, mapped by all."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from echelon.comm.shm.area import Area
from echelon.comm.shm.sharing import share_segments
from echelon.diagnosis.collective_call import CollectiveCall

# A piece this large amortises a round (some 20 µs), and still lies in the last-level cache when it
# is read.
HALF_NBYTES = 1 << 22


@final
class Staging:
    """Two halves of ``HALF_NBYTES`` on each rank, used in turn like the slots of ``Area``."""

    def __init__(self, area: Area, call: CollectiveCall, timeout: float) -> None:
        self._area = area
        segments = share_segments(
            area, call, 2 * HALF_NBYTES, what="staging for large collectives", timeout=timeout
        )
        self._halves = [
            [segments[rank].tensor(half * HALF_NBYTES, HALF_NBYTES) for half in (0, 1)]
            for rank in range(area.size)
        ]

    def parts(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The halves of all ranks in the coming round, as 1D tensors of ``numel`` elements."""
        half = (self._area.round + 1) & 1
        nbytes = numel * dtype.itemsize
        return [halves[half].narrow(0, 0, nbytes).view(dtype) for halves in self._halves]
