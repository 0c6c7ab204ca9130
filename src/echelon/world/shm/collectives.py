"""Each collective in rounds: small ones in slots, windows in place, large ones in pieces.

r: rank · n: ranks · k: round. Every function is called by all ranks at once; the first round is the
agreement on the call, later ones carry or release data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.errors import CollectiveMismatch
from echelon.layout import even_chunks
from echelon.world.arithmetic import reduce_into
from echelon.world.shm.area import SLOT_NBYTES, Area
from echelon.world.shm.staging import HALF_NBYTES, Staging
from echelon.world.work import Ticket

__all__ = ["Collectives"]

# Chunks are cut at cache lines, or two cores would write to one line.
_LINE_NBYTES = 64


@final
class Collectives:
    """The collectives of one group.

    Args:
        area: the group's shared memory.
        timeout: seconds to wait in a round.
    """

    def __init__(self, area: Area, timeout: float) -> None:
        self.area = area
        self.timeout = timeout
        self._staging: Staging | None = None
        self._windows: dict[
            int, tuple[int, Sequence[Tensor]]
        ] = {}  # by address of the local region

    # Windows ---------------------------------------------------------------------------------

    def add_window(self, number: int, regions: Sequence[Tensor]) -> None:
        """Make tensors inside a window known, so that collectives use them in place."""
        self._windows[regions[self.area.rank].untyped_storage().data_ptr()] = (number, regions)

    def drop_window(self, regions: Sequence[Tensor]) -> None:
        """Forget a window that is closed."""
        self._windows.pop(regions[self.area.rank].untyped_storage().data_ptr(), None)

    def _key(self, tensor: Tensor) -> int:
        """64 bits that say in which window ``tensor`` lies and where; 0: in none."""
        window = self._windows.get(tensor.untyped_storage().data_ptr())
        if window is None:
            return 0
        return window[0] << 48 | (int(tensor.storage_offset()) * tensor.dtype.itemsize + 1)

    def _in_place(self, tensor: Tensor, keys: Sequence[int]) -> list[Tensor] | None:
        """``tensor`` as all ranks see theirs, if all lie at one place of one window."""
        if not keys[0] or any(key != keys[0] for key in keys):
            return None
        _, regions = self._windows[tensor.untyped_storage().data_ptr()]
        start, numel, dtype = (
            tensor.storage_offset() * tensor.dtype.itemsize,
            tensor.numel(),
            tensor.dtype,
        )
        return [
            region.view(torch.uint8).narrow(0, start, numel * dtype.itemsize).view(dtype)
            for region in regions
        ]

    # Rounds ----------------------------------------------------------------------------------

    def _agree(self, ticket: Ticket, key: int = 0) -> list[int]:
        return self.area.agree(ticket, key, self.timeout)

    def _round(self, ticket: Ticket) -> None:
        self.area.next_round(ticket, self.timeout)

    def _staged(self, ticket: Ticket) -> Staging:
        if self._staging is None:
            self._staging = Staging(self.area, ticket, self.timeout)
        return self._staging

    # Reductions ------------------------------------------------------------------------------

    def all_reduce(self, ticket: Ticket, tensor: Tensor, op: str) -> None:
        area = self.area
        numel = tensor.numel()
        if tensor.nbytes <= SLOT_NBYTES:
            parts = area.parts(tensor.dtype, numel)
            parts[area.rank].copy_(tensor)
            self._agree(ticket)
            if numel:
                reduce_into([tensor], parts, op)
            return
        keys = self._agree(ticket, self._key(tensor))
        regions = self._in_place(tensor, keys)
        if regions is not None:
            start, stop = self._chunks(numel, tensor.dtype)[area.rank]
            if stop > start:
                views = [region[start:stop] for region in regions]
                reduce_into(views, views, op)
            self._round(ticket)
            return
        for first in range(0, numel, piece := HALF_NBYTES // tensor.dtype.itemsize):
            self._all_reduce_piece(ticket, tensor[first : first + piece], op)

    def _all_reduce_piece(self, ticket: Ticket, tensor: Tensor, op: str) -> None:
        """Each rank reduces one chunk; round one carries the inputs, round two the results."""
        area, numel, dtype = self.area, tensor.numel(), tensor.dtype
        staging = self._staged(ticket)
        chunks = self._chunks(numel, dtype)
        start, stop = chunks[area.rank]
        inputs = staging.parts(dtype, numel)
        mine = inputs[area.rank]
        mine[:start].copy_(tensor[:start])
        mine[stop:].copy_(tensor[stop:])
        self._round(ticket)
        results = staging.parts(dtype, numel)
        if stop > start:
            own = tensor[start:stop]
            parts = [own if r == area.rank else inputs[r][start:stop] for r in range(area.size)]
            reduce_into([own, results[area.rank][start:stop]], parts, op)
        self._round(ticket)
        for peer in area.peers:
            start, stop = chunks[peer]
            tensor[start:stop].copy_(results[peer][start:stop])

    def _chunks(self, numel: int, dtype: torch.dtype) -> list[tuple[int, int]]:
        return even_chunks(numel, self.area.size, max(1, _LINE_NBYTES // dtype.itemsize))

    def reduce_scatter(self, ticket: Ticket, output: Tensor, input: Tensor, op: str) -> None:
        area, numel, dtype = self.area, output.numel(), output.dtype
        if input.nbytes <= SLOT_NBYTES:
            parts = area.parts(dtype, input.numel())
            parts[area.rank].copy_(input)
            self._agree(ticket)
            if numel:
                reduce_into([output], [p.narrow(0, area.rank * numel, numel) for p in parts], op)
            return
        keys = self._agree(ticket, self._key(input))
        regions = self._in_place(input, keys)
        if regions is not None:
            own_parts = [p.narrow(0, area.rank * numel, numel) for p in regions]
            # Where the output lies on a part of another rank, that rank may not have read it yet.
            in_the_way = _share_memory(output, input) and not _same_place(
                output, own_parts[area.rank]
            )
            target = torch.empty_like(output) if in_the_way else output
            reduce_into([target], own_parts, op)
            self._round(ticket)  # all have read; the input may change
            if in_the_way:
                output.copy_(target)
            return
        staging = self._staged(ticket)
        lanes = input.view(area.size, numel)
        piece = HALF_NBYTES // (dtype.itemsize * area.size)
        for start in range(0, numel, piece):
            length = min(piece, numel - start)
            boxes = [
                part.view(area.size, length) for part in staging.parts(dtype, area.size * length)
            ]
            for peer in area.peers:
                boxes[area.rank][peer].copy_(lanes[peer, start : start + length])
            self._round(ticket)
            own = lanes[area.rank, start : start + length]
            parts = [own if r == area.rank else boxes[r][area.rank] for r in range(area.size)]
            reduce_into([output[start : start + length]], parts, op)

    def reduce(self, ticket: Ticket, tensor: Tensor, dst: int, op: str) -> None:
        area, numel = self.area, tensor.numel()
        self._agree(ticket)
        piece = HALF_NBYTES // tensor.dtype.itemsize
        for start in range(0, numel, piece):
            part = tensor[start : start + piece]
            parts = self._staged(ticket).parts(tensor.dtype, part.numel())
            parts[area.rank].copy_(part)
            self._round(ticket)
            if area.rank == dst:
                reduce_into([part], parts, op)

    # Data movement ---------------------------------------------------------------------------

    def all_gather(self, ticket: Ticket, outputs: Sequence[Tensor], input: Tensor) -> None:
        area, dtype = self.area, input.dtype
        longest = max(output.numel() for output in outputs)
        if longest * dtype.itemsize <= SLOT_NBYTES:
            parts = area.parts(dtype, longest)
            parts[area.rank][: input.numel()].copy_(input)
            self._agree(ticket)
            for output, part in zip(outputs, parts, strict=True):
                output.copy_(part[: output.numel()])
            return
        even = all(output.numel() == longest for output in outputs)
        keys = self._agree(ticket, self._key(input) if even else 0)
        regions = self._in_place(input, keys)
        if regions is not None:
            for output, region in zip(outputs, regions, strict=True):
                if output.data_ptr() != region.data_ptr():
                    output.copy_(region)
            self._round(ticket)
            return
        self._all_gather_pieces(ticket, outputs, input, longest)

    def _all_gather_pieces(
        self, ticket: Ticket, outputs: Sequence[Tensor], input: Tensor, longest: int
    ) -> None:
        area, dtype = self.area, input.dtype
        staging = self._staged(ticket)
        piece = HALF_NBYTES // dtype.itemsize
        own = outputs[area.rank]
        for start in range(0, longest, piece):
            parts = staging.parts(dtype, piece)
            mine = input[start : start + piece]
            parts[area.rank][: mine.numel()].copy_(mine)
            self._round(ticket)
            for peer in area.peers:
                target = outputs[peer][start : start + piece]
                target.copy_(parts[peer][: target.numel()])
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)

    def broadcast(self, ticket: Ticket, tensor: Tensor, src: int) -> None:
        area = self.area
        if tensor.nbytes <= SLOT_NBYTES:
            parts = area.parts(tensor.dtype, tensor.numel())
            if area.rank == src:
                parts[src].copy_(tensor)
            self._agree(ticket)
            if area.rank != src:
                tensor.copy_(parts[src])
            return
        self._agree(ticket)
        staging = self._staged(ticket)
        piece = HALF_NBYTES // tensor.dtype.itemsize
        for start in range(0, tensor.numel(), piece):
            part = tensor[start : start + piece]
            box = staging.parts(tensor.dtype, part.numel())[src]
            if area.rank == src:
                box.copy_(part)
            self._round(ticket)
            if area.rank != src:
                part.copy_(box)

    def gather(self, ticket: Ticket, outputs: Sequence[Tensor], tensor: Tensor, dst: int) -> None:
        area = self.area
        self._agree(ticket)
        piece = HALF_NBYTES // tensor.dtype.itemsize
        for start in range(0, tensor.numel(), piece):
            part = tensor[start : start + piece]
            parts = self._staged(ticket).parts(tensor.dtype, part.numel())
            parts[area.rank].copy_(part)
            self._round(ticket)
            for output, box in zip(outputs, parts, strict=False):  # no outputs but on dst
                output[start : start + piece].copy_(box)

    def scatter(self, ticket: Ticket, tensor: Tensor, inputs: Sequence[Tensor], src: int) -> None:
        area = self.area
        self._agree(ticket)
        piece = HALF_NBYTES // (tensor.dtype.itemsize * area.size)
        for start in range(0, tensor.numel(), piece):
            part = tensor[start : start + piece]
            box = self._staged(ticket).parts(tensor.dtype, area.size * part.numel())[src]
            lanes = box.view(area.size, part.numel())
            for lane, input in zip(lanes, inputs, strict=False):  # no inputs but on src
                lane.copy_(input[start : start + piece])
            self._round(ticket)
            part.copy_(lanes[area.rank])

    def all_to_all(
        self, ticket: Ticket, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> None:
        area, dtype = self.area, inputs[0].dtype
        longest = self._agree_on_lengths(ticket, outputs, inputs)
        piece = HALF_NBYTES // (dtype.itemsize * area.size)
        for start in range(0, longest, piece):
            length = min(piece, longest - start)
            boxes = [
                part.view(area.size, length)
                for part in self._staged(ticket).parts(dtype, area.size * length)
            ]
            for peer in area.peers:
                part = inputs[peer][start : start + length]
                boxes[area.rank][peer, : part.numel()].copy_(part)
            self._round(ticket)
            for peer in area.peers:
                part = outputs[peer][start : start + length]
                part.copy_(boxes[peer][area.rank, : part.numel()])
        outputs[area.rank].copy_(inputs[area.rank])

    def _agree_on_lengths(
        self, ticket: Ticket, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> int:
        """Check that ranks send what their peers expect; the length of the longest part."""
        area, n = self.area, self.area.size
        tables = area.parts(torch.int64, 2 * n)
        lengths = [part.numel() for part in (*inputs, *outputs)]
        tables[area.rank].copy_(torch.tensor(lengths))
        self._agree(ticket)
        table = [part.tolist() for part in tables]
        if any(table[s][r] != table[r][n + s] for s in range(n) for r in range(n)):
            texts = {
                r: f"all_to_all_single sends {table[r][:n]}, expects {table[r][n:]} elements"
                for r in range(n)
            }
            raise CollectiveMismatch(area.name, ticket.position, texts)
        return int(max(length for row in table for length in row))

    def barrier(self, ticket: Ticket) -> None:
        self._agree(ticket)


def _share_memory(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _same_place(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
