"""Large collectives on ordinary memory, which peers read in place by ``process_vm_readv``.

When these functions begin, all ranks have agreed on the call and posted the addresses of their
tensors. Every function ends with a round, after which no peer reads any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from echelon.comm.reduce_op import reduce_into
from echelon.comm.shm.area import Area, ExchangedParts
from echelon.comm.shm.peer_memory import PeerMemory, admit_readers
from echelon.diagnosis.collective_call import CollectiveCall
from echelon.errors import CommError

# The data of all peers for one step of a reduction stays in a core's L2 cache until it is added.
_SCRATCH_NBYTES = 1 << 19
_MAX_BLOCK_NBYTES = 1 << 18


def open_direct(area: Area, call: CollectiveCall) -> Direct | None:
    """The direct path, if every rank can read the memory of all others. Takes two rounds."""
    admit_readers()
    pids = [-1 if rank == area.rank else area.pid(rank) for rank in range(area.size)]
    memory = PeerMemory(pids)
    slots = area.slots(torch.int64, 1)
    slots[area.rank].fill_(memory.probe_address)
    area.next_round(call)
    can_read = memory.can_read([int(slot) for slot in slots])
    verdicts = area.slots(torch.int64, 1)
    verdicts[area.rank].fill_(can_read)
    area.next_round(call)
    return Direct(area, memory) if all(int(verdict) for verdict in verdicts) else None


@final
class Direct:
    """Collectives that read the memory of the other ranks."""

    def __init__(self, area: Area, memory: PeerMemory) -> None:
        self._area, self._memory = area, memory
        block = min(_MAX_BLOCK_NBYTES, _SCRATCH_NBYTES // max(1, area.size - 1)) & -64
        with torch.inference_mode(False):  # the scratch memory outlives the caller's mode
            self._scratch = {
                peer: torch.empty(block, dtype=torch.uint8, device="cpu") for peer in area.peers
            }
        self._block_nbytes = block

    # Reductions ------------------------------------------------------------------------------

    def all_reduce(self, call: CollectiveCall, tensor: Tensor, op: str) -> None:
        """Each rank reduces one chunk in place and then reads the chunks of its peers."""
        area, addresses = self._area, self._area.addresses(call)
        chunks = area.chunks(tensor.numel(), tensor.dtype)
        start, stop = chunks[area.rank]
        chunk = tensor[start:stop]
        self._reduce(call, chunk, chunk, start, op)
        area.next_round(call)
        for peer in area.peers:
            start, stop = chunks[peer]
            self._fetch(call, peer, addresses[peer], start, tensor[start:stop])
        area.next_round(call)

    def reduce_scatter(
        self, call: CollectiveCall, output: Tensor, input: Tensor, splits: Sequence[int], op: str
    ) -> None:
        """``output`` must not overlap a part of ``input`` that another rank reads."""
        start = sum(splits[: self._area.rank])
        self._reduce(call, output, input.narrow(0, start, output.numel()), start, op)
        self._area.next_round(call)

    def _reduce(
        self, call: CollectiveCall, output: Tensor, input: Tensor, offset: int, op: str
    ) -> None:
        """Reduce ``input`` with the elements of peers from ``offset`` on, block by block."""
        area, dtype = self._area, input.dtype
        addresses = area.addresses(call)
        block = self._block_nbytes // dtype.itemsize
        scratch = {peer: memory.view(dtype) for peer, memory in self._scratch.items()}
        for start in range(0, input.numel(), block):
            part = input[start : start + block]
            length = part.numel()
            parts = [part] * area.size
            for peer in area.peers:
                parts[peer] = scratch[peer][:length]
                self._fetch(call, peer, addresses[peer], offset + start, parts[peer])
            reduce_into([output[start : start + length]], parts, op)

    # Data movement ---------------------------------------------------------------------------

    def all_gather(self, call: CollectiveCall, outputs: Sequence[Tensor], input: Tensor) -> None:
        addresses = self._area.addresses(call)
        output = outputs[self._area.rank]
        if output.data_ptr() != input.data_ptr():
            output.copy_(input)
        for peer in self._area.peers:
            self._fetch(call, peer, addresses[peer], 0, outputs[peer])
        self._area.next_round(call)

    def broadcast(self, call: CollectiveCall, tensor: Tensor, src: int) -> None:
        if self._area.rank != src:
            self._fetch(call, src, self._area.addresses(call)[src], 0, tensor)
        self._area.next_round(call)

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
        self._area.next_round(call)

    def _fetch(
        self, call: CollectiveCall, peer: int, address: int, start: int, output: Tensor
    ) -> None:
        """Read elements from ``start`` on of the tensor of ``peer`` that lies at ``address``."""
        if self._memory.read(peer, address + start * output.dtype.itemsize, output):
            return
        self._area.next_round(call)  # raises ``RankFailed`` if the peer died or left
        raise CommError(
            f"rank {self._area.job_ranks[self._area.rank]} could not read {output.nbytes} bytes of "
            f"rank {self._area.job_ranks[peer]} during {call}: that memory was freed or moved "
            "before the call had ended"
        )
