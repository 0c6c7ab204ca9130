"""Large collectives on ordinary memory, which peers read where it lies.

r: rank · n: ranks. When these functions begin, all ranks have agreed on the call and posted the
address of their tensor; every function ends with a round, after which nobody reads any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.reduce_op import reduce_into
from echelon.comm.shm.area import Area
from echelon.comm.shm.chunks import line_chunks
from echelon.comm.shm.exchange import ExchangedParts
from echelon.comm.shm.peer_memory import PeerMemory, admit_readers
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CommError

# What is read of all peers for one step of a reduction: it stays in a core's L2 until it is added.
_SCRATCH_NBYTES = 1 << 19
_MAX_BLOCK_NBYTES = 1 << 18


def open_direct(area: Area, call: CollectiveCall, timeout: float) -> Direct | None:
    """The direct way, if every rank can read every other's memory. Takes two rounds."""
    admit_readers()
    pids = [-1 if rank == area.rank else area.pid(rank) for rank in range(area.size)]
    memory = PeerMemory(pids)
    slots = area.parts(torch.int64, 1)
    slots[area.rank].fill_(memory.probe_address)
    area.next_round(call, timeout)
    can_read = memory.can_read([int(slot) for slot in slots])
    verdicts = area.parts(torch.int64, 1)
    verdicts[area.rank].fill_(can_read)
    area.next_round(call, timeout)
    return Direct(area, memory, timeout) if all(int(verdict) for verdict in verdicts) else None


@final
class Direct:
    """Collectives that read the memory of the other ranks.

    Args:
        area: the group's shared memory, for rounds and addresses.
        memory: of the other ranks.
        timeout: seconds to wait in a round.
    """

    def __init__(self, area: Area, memory: PeerMemory, timeout: float) -> None:
        self._area, self._memory, self._timeout = area, memory, timeout
        block = min(_MAX_BLOCK_NBYTES, _SCRATCH_NBYTES // max(1, area.size - 1))
        with torch.inference_mode(False):  # it outlives the caller's mode
            self._scratch = {
                peer: torch.empty(block & -64, dtype=torch.uint8) for peer in area.peers
            }
        self._block_nbytes = block & -64

    # Reductions ------------------------------------------------------------------------------

    def all_reduce(self, call: CollectiveCall, tensor: Tensor, op: str) -> None:
        """Each rank reduces one chunk in place and then reads the others'."""
        addresses = self._area.addresses(call)
        chunks = line_chunks(tensor.numel(), tensor.dtype, self._area.size)
        start, stop = chunks[self._area.rank]
        own = tensor[start:stop]
        self._reduce(call, own, own, addresses, start, op)
        self._round(call)
        for peer in self._area.peers:
            start, stop = chunks[peer]
            self._fetch(call, peer, addresses[peer], start, tensor[start:stop])
        self._round(call)

    def reduce_scatter(
        self, call: CollectiveCall, output: Tensor, input: Tensor, splits: Sequence[int], op: str
    ) -> None:
        """``output`` must not lie on a part of ``input`` that another rank reads."""
        start = sum(splits[: self._area.rank])
        own = input.narrow(0, start, output.numel())
        self._reduce(call, output, own, self._area.addresses(call), start, op)
        self._round(call)

    def _reduce(
        self,
        call: CollectiveCall,
        output: Tensor,
        own: Tensor,
        addresses: Sequence[int],
        offset: int,
        op: str,
    ) -> None:
        """Reduce ``own`` with the others' elements from ``offset`` on, block by block."""
        area, dtype = self._area, own.dtype
        block = self._block_nbytes // dtype.itemsize
        scratch = {peer: one.view(dtype) for peer, one in self._scratch.items()}
        for start in range(0, own.numel(), block):
            mine = own[start : start + block]
            length = mine.numel()
            parts = [mine] * area.size
            for peer in area.peers:
                parts[peer] = scratch[peer][:length]
                self._fetch(call, peer, addresses[peer], offset + start, parts[peer])
            reduce_into([output[start : start + length]], parts, op)

    # Data movement ---------------------------------------------------------------------------

    def all_gather(self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor) -> None:
        addresses = self._area.addresses(call)
        own = outputs[self._area.rank]
        if own.data_ptr() != input.data_ptr():
            own.copy_(input)
        for peer in self._area.peers:
            self._fetch(call, peer, addresses[peer], 0, outputs[peer])
        self._round(call)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, src: int) -> None:
        if self._area.rank != src:
            self._fetch(call, src, self._area.addresses(call)[src], 0, tensor)
        self._round(call)

    def exchange(
        self,
        call: CollectiveCall,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parts: ExchangedParts,
    ) -> None:
        rank = self._area.rank
        outputs[rank].copy_(inputs[rank])
        for peer in self._area.peers:
            self._fetch(call, peer, parts.addresses[peer][rank], 0, outputs[peer])
        self._round(call)

    # Below -----------------------------------------------------------------------------------

    def _round(self, call: CollectiveCall) -> None:
        self._area.next_round(call, self._timeout)

    def _fetch(
        self, call: CollectiveCall, peer: int, address: int, start: int, output: Tensor
    ) -> None:
        """Read elements of ``peer`` from ``start`` on, of the tensor that is at ``address``."""
        if self._memory.read(peer, address + start * output.dtype.itemsize, output):
            return
        self._round(call)  # raises what the board knows of a rank that died or left
        raise CommError(
            f"rank {self._area.ranks[self._area.rank]} could not read {output.nbytes} bytes of "
            f"rank {self._area.ranks[peer]} during {call}: that memory was freed or moved "
            "before the call had ended"
        )
