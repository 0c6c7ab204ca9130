"""Each collective of a group by the fastest path that its data allows.

Data of up to 64 KiB travels in the slots of the first round, and windows are used in place. For
all other data, peers read each other's memory (``direct``), or copy through shared memory where
that is forbidden (``staged``). All ranks call each function at once. The first round is the
agreement on the call; later ones carry data, or free memory that peers have read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm.derived import Barrier, Gather, Scatter
from echelon.comm.primitives import (
    AllGather,
    AllReduce,
    Broadcast,
    Derived,
    Exchange,
    Primitive,
    ReduceScatter,
)
from echelon.comm.reduce_op import reduce_into
from echelon.comm.shm.area import SLOT_NBYTES, Area, ExchangedParts
from echelon.comm.shm.direct import Direct, open_direct
from echelon.comm.shm.staged import Staged
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CollectiveMismatch

# A window key has the number of the window above these bits, and an offset below.
_WINDOW_SHIFT = 48


@final
@dataclass(frozen=True)
class _SharedWindow:
    """A window that is open, as all ranks know it."""

    number: int
    regions: Sequence[Tensor]


@final
class Collectives:
    """The collectives of one group."""

    def __init__(self, area: Area) -> None:
        self.area = area
        self._large: Direct | Staged | None = None
        self._windows: dict[int, _SharedWindow] = {}  # by address of the local region

    # Windows ---------------------------------------------------------------------------------

    def add_window(self, number: int, regions: Sequence[Tensor]) -> None:
        """Let collectives use tensors of this window in place."""
        address = _storage_address(regions[self.area.rank])
        self._windows[address] = _SharedWindow(number, regions)

    def drop_window(self, regions: Sequence[Tensor]) -> None:
        """Forget a window that is closed."""
        self._windows.pop(_storage_address(regions[self.area.rank]), None)

    def _window_of(self, tensor: Tensor) -> _SharedWindow | None:
        """The open window in which ``tensor`` lies. A call keeps it, though it may be dropped."""
        return self._windows.get(_storage_address(tensor))

    def _in_place(
        self, tensor: Tensor, window: _SharedWindow | None, keys: Sequence[int]
    ) -> list[Tensor] | None:
        """The tensors of all ranks, if they lie at the same place of one window; else None."""
        if window is None or any(key != keys[0] for key in keys):
            return None
        start, nbytes = _offset_nbytes(tensor), tensor.nbytes
        return [
            region.view(torch.uint8).narrow(0, start, nbytes).view(tensor.dtype)
            for region in window.regions
        ]

    # First rounds ----------------------------------------------------------------------------

    def _share_small(self, call: CollectiveCall, data: Tensor, numel: int) -> list[Tensor]:
        """Agree on the call, and return slots of ``numel`` elements with the data of all ranks."""
        area = self.area
        slots = area.slots(data.dtype, numel)
        slot = slots[area.rank]
        (slot if data.numel() == numel else slot[: data.numel()]).copy_(data)
        area.agree(call)
        return slots

    def _agree(self, call: CollectiveCall, tensor: Tensor) -> list[Tensor] | None:
        """Agree on the call, and return the tensors of all ranks if they lie in a window.

        Peers learn the address of ``tensor``, too.
        """
        window = self._window_of(tensor)
        self.area.agree(call, _key(window, tensor), tensor.data_ptr())
        return self._in_place(tensor, window, self.area.keys(call))

    def _large_path(self, call: CollectiveCall) -> Direct | Staged:
        """The path of large data, which all ranks choose together at the first large call."""
        if self._large is None:
            self._large = open_direct(self.area, call) or Staged(self.area, call)
        return self._large

    # Reductions ------------------------------------------------------------------------------

    def all_reduce(self, call: CollectiveCall, operation: AllReduce) -> None:
        area, tensor, op = self.area, operation.tensor, operation.op
        numel = tensor.numel()
        if tensor.nbytes <= SLOT_NBYTES:
            slots = self._share_small(call, tensor, numel)
            if numel:
                reduce_into([tensor], slots, op)
            return
        regions = self._agree(call, tensor)
        if regions is None:
            self._large_path(call).all_reduce(call, tensor, op)
            return
        start, stop = area.chunks(numel, tensor.dtype)[area.rank]
        if stop > start:
            views = [region[start:stop] for region in regions]
            reduce_into(views, views, op)
        area.next_round(call)

    def reduce_scatter(self, call: CollectiveCall, operation: ReduceScatter) -> None:
        output, input, splits = operation.output, operation.input, operation.splits
        area, op, numel = self.area, operation.op, output.numel()
        start = sum(splits[: area.rank])
        if input.nbytes <= SLOT_NBYTES:
            slots = self._share_small(call, input, input.numel())
            if numel:
                reduce_into([output], [slot.narrow(0, start, numel) for slot in slots], op)
            return
        regions = self._agree(call, input)
        target = operation.target(area.rank)
        if regions is None:
            self._large_path(call).reduce_scatter(call, target, input, splits, op)
        else:
            if numel:
                reduce_into([target], [r.narrow(0, start, numel) for r in regions], op)
            area.next_round(call)  # all ranks have read, so the input may change
        if target is not output:
            output.copy_(target)

    # Data movement ---------------------------------------------------------------------------

    def all_gather(self, call: CollectiveCall, operation: AllGather) -> None:
        area, outputs, input = self.area, operation.outputs, operation.input
        numels = [output.numel() for output in outputs]
        longest = max(numels)
        if longest * input.dtype.itemsize <= SLOT_NBYTES:
            slots = self._share_small(call, input, longest)
            for output, slot, numel in zip(outputs, slots, numels, strict=True):
                output.copy_(slot if numel == longest else slot[:numel])
            return
        regions = self._agree(call, input)
        if regions is None or min(numels) < longest:
            self._large_path(call).all_gather(call, outputs, input)
            return
        for output, region in zip(outputs, regions, strict=True):
            if output.data_ptr() != region.data_ptr():
                output.copy_(region)
        area.next_round(call)

    def broadcast(self, call: CollectiveCall, operation: Broadcast) -> None:
        area, tensor, src = self.area, operation.tensor, operation.src
        if tensor.nbytes <= SLOT_NBYTES:
            slot = area.slots(tensor.dtype, tensor.numel())[src]
            if area.rank == src:
                slot.copy_(tensor)
            area.agree(call)
            if area.rank != src:
                tensor.copy_(slot)
            return
        regions = self._agree(call, tensor)
        if regions is None:
            self._large_path(call).broadcast(call, tensor, src)
            return
        if area.rank != src:
            tensor.copy_(regions[src])
        area.next_round(call)

    def exchange(self, call: CollectiveCall, operation: Exchange) -> None:
        parts = self._agree_on_parts(call, operation)
        if parts.longest:
            self._large_path(call).exchange(call, operation.outputs, operation.inputs, parts)

    def gather(self, call: CollectiveCall, operation: Gather) -> None:
        """An exchange in which all ranks know all lengths, and each sends from one address."""
        area, tensor = self.area, operation.tensor
        if tensor.nbytes <= SLOT_NBYTES:
            slots = self._share_small(call, tensor, tensor.numel())
            if area.rank == operation.dst:
                for output, slot in zip(operation.outputs, slots, strict=True):
                    output.copy_(slot)
            return
        self._agree(call, tensor)
        exchange = operation.primitive(area.rank, area.size)
        addresses = [[address] * area.size for address in area.addresses(call)]
        parts = ExchangedParts(tensor.numel(), addresses)
        self._large_path(call).exchange(call, exchange.outputs, exchange.inputs, parts)

    def scatter(self, call: CollectiveCall, operation: Scatter) -> None:
        """All ranks read the slot of one, if that has room for all parts."""
        area, tensor, src = self.area, operation.tensor, operation.src
        numel = tensor.numel()
        if tensor.nbytes * area.size > SLOT_NBYTES:
            self.exchange(call, operation.primitive(area.rank, area.size))
            return
        slot = area.slots(tensor.dtype, numel * area.size)[src]
        if numel and area.rank == src:
            torch.cat(list(operation.inputs), out=slot)
        area.agree(call)
        tensor.copy_(slot.narrow(0, area.rank * numel, numel))

    def barrier(self, call: CollectiveCall, operation: Barrier) -> None:
        self.area.agree(call)

    def _agree_on_parts(self, call: CollectiveCall, operation: Exchange) -> ExchangedParts:
        """Agree on the call, and check that each rank sends as much as its peers expect."""
        area, n = self.area, self.area.size
        # Of each rank: the lengths of its inputs, the lengths of its outputs, and the addresses of
        # its inputs.
        slots = area.slots(torch.int64, 3 * n)
        inputs = operation.inputs
        lengths = [part.numel() for part in (*inputs, *operation.outputs)]
        slots[area.rank].numpy()[:] = [*lengths, *(part.data_ptr() for part in inputs)]
        area.agree(call)
        rows = [slot.tolist() for slot in slots]
        sent, expected = [row[:n] for row in rows], [row[n : 2 * n] for row in rows]
        if [*map(list, zip(*sent, strict=True))] != expected:
            parts = f"sends {sent[area.rank]}, expects {expected[area.rank]} elements"
            text = f"{parts} at {call.place}"
            calls = area.exchange_texts(call, text)
            raise CollectiveMismatch.of_parts(area.name, call.position, calls)
        return ExchangedParts(max(map(max, sent)), [row[2 * n :] for row in rows])


def _key(window: _SharedWindow | None, tensor: Tensor) -> int:
    """64 bits that say where in which window ``tensor`` lies; 0 if it lies in none."""
    if window is None:
        return 0
    return window.number << _WINDOW_SHIFT | (_offset_nbytes(tensor) + 1)


def _storage_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _offset_nbytes(tensor: Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


METHODS: dict[type[Primitive | Derived], Callable[[Collectives, CollectiveCall, Any], None]] = {
    AllReduce: Collectives.all_reduce,
    ReduceScatter: Collectives.reduce_scatter,
    AllGather: Collectives.all_gather,
    Broadcast: Collectives.broadcast,
    Exchange: Collectives.exchange,
    Barrier: Collectives.barrier,
    Gather: Collectives.gather,
    Scatter: Collectives.scatter,
}
