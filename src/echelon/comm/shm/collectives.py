"""Each collective of a group by the shortest way that its data allows.

Up to 64 KiB travel in the slots of the first round, windows are used in place, and for the rest
peers read each other's memory (``direct``), or copy through shared memory where that is forbidden
(``staged``). Every function is called by all ranks at once; the first round is the agreement on
the call, later ones carry or release data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from echelon.comm.derived import Barrier, Gather
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
from echelon.comm.shm.area import SLOT_NBYTES, Area
from echelon.comm.shm.chunks import line_chunks
from echelon.comm.shm.direct import Direct, open_direct
from echelon.comm.shm.exchange import ExchangedParts
from echelon.comm.shm.staged import Staged, Staging
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CollectiveMismatch


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
        self._large: Direct | Staged | None = None
        # By address of the local region.
        self._windows: dict[int, tuple[int, Sequence[Tensor]]] = {}

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

    def agree(self, call: CollectiveCall, tensor: Tensor | None = None) -> list[Tensor] | None:
        """First round: the call is the same on all ranks; post where ``tensor`` lies.

        Returns:
            ``tensor`` as all ranks see theirs, if all lie at one place of one window.
        """
        area = self.area
        if tensor is None:
            area.agree(call, self.timeout)
            return None
        area.agree(call, self.timeout, self._key(tensor), tensor.data_ptr())
        return self._in_place(tensor, area.keys(call))

    def _round(self, call: CollectiveCall) -> None:
        self.area.next_round(call, self.timeout)

    def _ways(self, call: CollectiveCall) -> Direct | Staged:
        """How large data travels here. Found out once, together with the other ranks."""
        if self._large is None:
            self._large = open_direct(self.area, call, self.timeout) or Staged(
                self.area, Staging(self.area, call, self.timeout), self.timeout
            )
        return self._large

    # Reductions ------------------------------------------------------------------------------

    def all_reduce(self, call: CollectiveCall, operation: AllReduce) -> None:
        area, tensor, op = self.area, operation.tensor, operation.op
        numel = tensor.numel()
        if tensor.nbytes <= SLOT_NBYTES:
            parts = area.parts(tensor.dtype, numel)
            parts[area.rank].copy_(tensor)
            area.agree(call, self.timeout)
            if numel:
                reduce_into([tensor], parts, op)
            return
        regions = self.agree(call, tensor)
        if regions is None:
            self._ways(call).all_reduce(call, tensor, op)
            return
        start, stop = line_chunks(numel, tensor.dtype, area.size)[area.rank]
        if stop > start:
            views = [region[start:stop] for region in regions]
            reduce_into(views, views, op)
        self._round(call)

    def reduce_scatter(self, call: CollectiveCall, operation: ReduceScatter) -> None:
        output, input, splits = operation.output, operation.input, operation.splits
        area, op, numel = self.area, operation.op, output.numel()
        start = sum(splits[: area.rank])
        if input.nbytes <= SLOT_NBYTES:
            parts = area.parts(output.dtype, input.numel())
            parts[area.rank].copy_(input)
            area.agree(call, self.timeout)
            if numel:
                reduce_into([output], [p.narrow(0, start, numel) for p in parts], op)
            return
        regions = self.agree(call, input)
        target = operation.target(area.rank)
        if regions is None:
            self._ways(call).reduce_scatter(call, target, input, splits, op)
        else:
            if numel:
                reduce_into([target], [p.narrow(0, start, numel) for p in regions], op)
            self._round(call)  # all have read; the input may change
        if target is not output:
            output.copy_(target)

    # Data movement ---------------------------------------------------------------------------

    def all_gather(self, call: CollectiveCall, operation: AllGather) -> None:
        area, outputs, input = self.area, operation.outputs, operation.input
        dtype = input.dtype
        longest = max(output.numel() for output in outputs)
        if longest * dtype.itemsize <= SLOT_NBYTES:
            parts = area.parts(dtype, longest)
            parts[area.rank][: input.numel()].copy_(input)
            area.agree(call, self.timeout)
            for output, part in zip(outputs, parts, strict=True):
                output.copy_(part[: output.numel()])
            return
        regions = self.agree(call, input)
        even = all(output.numel() == longest for output in outputs)
        if regions is None or not even:
            self._ways(call).all_gather(call, outputs, input)
            return
        for output, region in zip(outputs, regions, strict=True):
            if output.data_ptr() != region.data_ptr():
                output.copy_(region)
        self._round(call)

    def broadcast(self, call: CollectiveCall, operation: Broadcast) -> None:
        area, tensor, src = self.area, operation.tensor, operation.src
        if tensor.nbytes <= SLOT_NBYTES:
            parts = area.parts(tensor.dtype, tensor.numel())
            if area.rank == src:
                parts[src].copy_(tensor)
            area.agree(call, self.timeout)
            if area.rank != src:
                tensor.copy_(parts[src])
            return
        regions = self.agree(call, tensor)
        if regions is None:
            self._ways(call).broadcast(call, tensor, src)
            return
        if area.rank != src:
            tensor.copy_(regions[src])
        self._round(call)

    def exchange(self, call: CollectiveCall, operation: Exchange) -> None:
        outputs, inputs = operation.outputs, operation.inputs
        parts = self._agree_on_parts(call, operation)
        if parts.longest:
            self._ways(call).exchange(call, outputs, inputs, parts)

    def gather(self, call: CollectiveCall, operation: Gather) -> None:
        """An exchange in which all know all lengths, and each rank sends from one address."""
        area, tensor = self.area, operation.tensor
        if tensor.nbytes <= SLOT_NBYTES:
            slots = area.parts(tensor.dtype, tensor.numel())
            slots[area.rank].copy_(tensor)
            area.agree(call, self.timeout)
            if area.rank == operation.dst:
                for output, slot in zip(operation.outputs, slots, strict=True):
                    output.copy_(slot)
            return
        self.agree(call, tensor)
        exchange = operation.primitive(area.rank, area.size)
        addresses = [[address] * area.size for address in area.addresses(call)]
        parts = ExchangedParts(tensor.numel(), addresses)
        self._ways(call).exchange(call, exchange.outputs, exchange.inputs, parts)

    def barrier(self, call: CollectiveCall, operation: Barrier) -> None:
        self.area.agree(call, self.timeout)

    def _agree_on_parts(self, call: CollectiveCall, operation: Exchange) -> ExchangedParts:
        """Check that ranks send what their peers expect; where the parts of all ranks lie."""
        area, n = self.area, self.area.size
        tables = area.parts(torch.int64, 3 * n)
        inputs = operation.inputs
        lengths = [part.numel() for part in (*inputs, *operation.outputs)]
        tables[area.rank].numpy()[:] = [*lengths, *(part.data_ptr() for part in inputs)]
        self.agree(call)
        table = [part.tolist() for part in tables]
        if any(table[s][r] != table[r][n + s] for s in range(n) for r in range(n)):
            own = table[area.rank]
            text = f"sends {own[:n]}, expects {own[n : 2 * n]} elements at {call.place}"
            calls = area.exchange_texts(call, text, self.timeout)
            raise CollectiveMismatch.of_parts(area.name, call.position, calls)
        longest = max(length for row in table for length in row[:n])
        return ExchangedParts(longest, [row[2 * n :] for row in table])


METHODS: dict[type[Primitive | Derived], Callable[[Collectives, CollectiveCall, Any], None]] = {
    AllReduce: Collectives.all_reduce,
    ReduceScatter: Collectives.reduce_scatter,
    AllGather: Collectives.all_gather,
    Broadcast: Collectives.broadcast,
    Exchange: Collectives.exchange,
    Barrier: Collectives.barrier,
    Gather: Collectives.gather,
}
