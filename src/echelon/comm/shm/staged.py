"""Large collectives that copy their data through shared memory, in pieces.

They serve where ranks may not read each other's memory, as in some containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.reduce_op import reduce_into
from echelon.comm.shm.area import Area, ExchangedParts
from echelon.diagnosis.collective_call import CollectiveCall

# A piece of this size takes much longer than a round, and is still in the last-level cache when
# peers read it.
HALF_NBYTES = 1 << 22


@final
class Staged:
    """Collectives in which each rank copies the data for its peers to its staging memory.

    That has two halves of ``HALF_NBYTES``, which alternate like the slots of ``Area``.
    """

    def __init__(self, area: Area, call: CollectiveCall) -> None:
        self._area = area
        what = "staging for large collectives"
        segments = area.share_segments(call, 2 * HALF_NBYTES, what=what)
        self._halves = [
            [segments[rank].tensor(half * HALF_NBYTES, HALF_NBYTES) for half in (0, 1)]
            for rank in range(area.size)
        ]

    def _parts(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """The halves of all ranks in the next round, as 1D tensors of ``numel`` elements."""
        half = (self._area.round + 1) & 1
        nbytes = numel * dtype.itemsize
        return [halves[half].narrow(0, 0, nbytes).view(dtype) for halves in self._halves]

    # Reductions ------------------------------------------------------------------------------

    def all_reduce(self, call: CollectiveCall, tensor: Tensor, op: str) -> None:
        for first in range(0, tensor.numel(), piece := HALF_NBYTES // tensor.dtype.itemsize):
            self._all_reduce_piece(call, tensor[first : first + piece], op)

    def _all_reduce_piece(self, call: CollectiveCall, tensor: Tensor, op: str) -> None:
        """Each rank reduces one chunk; round one carries the inputs, round two the results."""
        area, numel, dtype = self._area, tensor.numel(), tensor.dtype
        chunks = area.chunks(numel, dtype)
        start, stop = chunks[area.rank]
        inputs = self._parts(dtype, numel)
        inputs[area.rank][:start].copy_(tensor[:start])
        inputs[area.rank][stop:].copy_(tensor[stop:])
        self._area.next_round(call)
        results = self._parts(dtype, numel)
        if stop > start:
            chunk = tensor[start:stop]
            parts = [part[start:stop] for part in inputs]
            parts[area.rank] = chunk
            reduce_into([chunk, results[area.rank][start:stop]], parts, op)
        self._area.next_round(call)
        for peer in area.peers:
            start, stop = chunks[peer]
            tensor[start:stop].copy_(results[peer][start:stop])

    def reduce_scatter(
        self, call: CollectiveCall, output: Tensor, input: Tensor, splits: Sequence[int], op: str
    ) -> None:
        rank = self._area.rank
        inputs = input.split(list(splits))
        for start, pieces in self._exchange_pieces(call, inputs, max(splits)):
            piece = inputs[rank][start : start + pieces[rank].numel()]
            if numel := piece.numel():
                parts = [other[:numel] for other in pieces]
                parts[rank] = piece
                reduce_into([output[start : start + numel]], parts, op)

    # Data movement ---------------------------------------------------------------------------

    def all_gather(self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor) -> None:
        area, dtype = self._area, input.dtype
        piece = HALF_NBYTES // dtype.itemsize
        for start in range(0, max(output.numel() for output in outputs), piece):
            parts = self._parts(dtype, piece)
            source = input[start : start + piece]
            parts[area.rank][: source.numel()].copy_(source)
            area.next_round(call)
            for peer in area.peers:
                target = outputs[peer][start : start + piece]
                target.copy_(parts[peer][: target.numel()])
        output = outputs[area.rank]
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, src: int) -> None:
        area = self._area
        piece = HALF_NBYTES // tensor.dtype.itemsize
        for start in range(0, tensor.numel(), piece):
            part = tensor[start : start + piece]
            staged = self._parts(tensor.dtype, part.numel())[src]
            if area.rank == src:
                staged.copy_(part)
            area.next_round(call)
            if area.rank != src:
                part.copy_(staged)

    def exchange(
        self,
        call: CollectiveCall,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parts: ExchangedParts,
    ) -> None:
        area = self._area
        for start, pieces in self._exchange_pieces(call, inputs, parts.longest):
            for peer in area.peers:
                target = outputs[peer][start : start + pieces[peer].numel()]
                target.copy_(pieces[peer][: target.numel()])
        outputs[area.rank].copy_(inputs[area.rank])

    def _exchange_pieces(
        self, call: CollectiveCall, inputs: Sequence[Tensor], longest: int
    ) -> Iterator[tuple[int, list[Tensor]]]:
        """Send ``inputs[r]`` to rank ``r``, piece by piece.

        Yields where a piece starts and the pieces that all ranks sent to this one; the piece of
        this rank itself is not filled.
        """
        area, dtype = self._area, inputs[0].dtype
        piece = HALF_NBYTES // (dtype.itemsize * area.size)
        for start in range(0, longest, piece):
            length = min(piece, longest - start)
            tables = [
                part.view(area.size, length) for part in self._parts(dtype, area.size * length)
            ]
            for peer in area.peers:
                part = inputs[peer][start : start + length]
                tables[area.rank][peer, : part.numel()].copy_(part)
            area.next_round(call)
            yield start, [table[area.rank] for table in tables]
