"""Large collectives that copy their data through shared memory, in pieces.

The way where ranks may not read each other's memory, as in some containers. r: rank · n: ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.reduce_op import reduce_into
from echelon.comm.shm.area import Area
from echelon.comm.shm.chunks import line_chunks
from echelon.comm.shm.exchange import ExchangedParts
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


@final
class Staged:
    """Collectives in which a rank copies what others need into its half of the staging.

    Args:
        area: the group's shared memory, for rounds.
        staging: room for a piece of every rank.
        timeout: seconds to wait in a round.
    """

    def __init__(self, area: Area, staging: Staging, timeout: float) -> None:
        self._area, self._staging, self._timeout = area, staging, timeout

    # Reductions ------------------------------------------------------------------------------

    def all_reduce(self, call: CollectiveCall, tensor: Tensor, op: str) -> None:
        for first in range(0, tensor.numel(), piece := HALF_NBYTES // tensor.dtype.itemsize):
            self._all_reduce_piece(call, tensor[first : first + piece], op)

    def _all_reduce_piece(self, call: CollectiveCall, tensor: Tensor, op: str) -> None:
        """Each rank reduces one chunk; round one carries the inputs, round two the results."""
        area, numel, dtype = self._area, tensor.numel(), tensor.dtype
        chunks = line_chunks(numel, dtype, area.size)
        start, stop = chunks[area.rank]
        inputs = self._staging.parts(dtype, numel)
        mine = inputs[area.rank]
        mine[:start].copy_(tensor[:start])
        mine[stop:].copy_(tensor[stop:])
        self._round(call)
        results = self._staging.parts(dtype, numel)
        if stop > start:
            own = tensor[start:stop]
            parts = [own if r == area.rank else inputs[r][start:stop] for r in range(area.size)]
            reduce_into([own, results[area.rank][start:stop]], parts, op)
        self._round(call)
        for peer in area.peers:
            start, stop = chunks[peer]
            tensor[start:stop].copy_(results[peer][start:stop])

    def reduce_scatter(
        self, call: CollectiveCall, output: Tensor, input: Tensor, splits: Sequence[int], op: str
    ) -> None:
        rank = self._area.rank
        lanes = input.split(list(splits))
        for start, boxes in self._traded(call, lanes, max(splits)):
            own = lanes[rank][start : start + boxes[rank].numel()]
            if own.numel():
                parts = [box[: own.numel()] for box in boxes]
                parts[rank] = own
                reduce_into([output[start : start + own.numel()]], parts, op)

    # Data movement ---------------------------------------------------------------------------

    def all_gather(self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor) -> None:
        area, dtype = self._area, input.dtype
        piece = HALF_NBYTES // dtype.itemsize
        own = outputs[area.rank]
        for start in range(0, max(output.numel() for output in outputs), piece):
            parts = self._staging.parts(dtype, piece)
            mine = input[start : start + piece]
            parts[area.rank][: mine.numel()].copy_(mine)
            self._round(call)
            for peer in area.peers:
                target = outputs[peer][start : start + piece]
                target.copy_(parts[peer][: target.numel()])
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, src: int) -> None:
        area = self._area
        piece = HALF_NBYTES // tensor.dtype.itemsize
        for start in range(0, tensor.numel(), piece):
            part = tensor[start : start + piece]
            box = self._staging.parts(tensor.dtype, part.numel())[src]
            if area.rank == src:
                box.copy_(part)
            self._round(call)
            if area.rank != src:
                part.copy_(box)

    def exchange(
        self,
        call: CollectiveCall,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parts: ExchangedParts,
    ) -> None:
        area = self._area
        for start, boxes in self._traded(call, inputs, parts.longest):
            for peer in area.peers:
                part = outputs[peer][start : start + boxes[peer].numel()]
                part.copy_(boxes[peer][: part.numel()])
        outputs[area.rank].copy_(inputs[area.rank])

    # Below -----------------------------------------------------------------------------------

    def _traded(
        self, call: CollectiveCall, lanes: Sequence[Tensor], longest: int
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Send ``lanes[r]`` to rank ``r``, piece by piece.

        Yields:
            Where a piece starts, and what each rank sent to this one (its own box holds nothing).
        """
        area, dtype = self._area, lanes[0].dtype
        piece = HALF_NBYTES // (dtype.itemsize * area.size)
        for start in range(0, longest, piece):
            length = min(piece, longest - start)
            boxes = [
                part.view(area.size, length)
                for part in self._staging.parts(dtype, area.size * length)
            ]
            for peer in area.peers:
                part = lanes[peer][start : start + length]
                boxes[area.rank][peer, : part.numel()].copy_(part)
            self._round(call)
            yield start, [box[area.rank] for box in boxes]

    def _round(self, call: CollectiveCall) -> None:
        self._area.next_round(call, self._timeout)
