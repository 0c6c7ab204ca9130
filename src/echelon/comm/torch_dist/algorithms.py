"""Collectives as messages between all pairs of ranks; sums in rank order, in place, in pieces.

Every algorithm is flat: each rank talks to each other rank itself. So a rank that waits waits for
the one that is late, and can name it. Reductions move in pieces: while one piece is reduced, the
next one is on its way, and scratch memory does not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

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
from echelon.comm.torch_dist.peers import PHASE, Peers, Posted, sized_tag
from echelon.errors import ArgumentError
from echelon.ranges import even_chunks

# One message of a reduction. Smaller: more messages; larger: less overlap, and no cache holds it.
PIECE_NBYTES = 4 << 20
# Pieces that may be under way to a rank at any time: enough to hide that it is not always there.
SCRATCH_NBYTES = 32 << 20
# Up to this many bytes sent by a rank, one round with everything beats two rounds with parts.
ONE_ROUND_NBYTES = 768 << 10
# Up to this size the source sends to everyone itself; above, the receivers share the work.
FLAT_BROADCAST_NBYTES = 1 << 20
_ALIGN_NBYTES = 64


@final
class Algorithms:
    """The collectives of one rank. One runs at a time, because they share the scratch memory.

    Args:
        peers: the other ranks.
        device: where tensors live.
    """

    def __init__(self, peers: Peers, device: torch.device) -> None:
        self._peers = peers
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._device = device

    def run(self, tag: int, operation: Primitive | Derived) -> None:
        """Carry the operation out with messages of this tag; all ranks run it."""
        match operation:
            case AllReduce(tensor=tensor, op=op):
                self._all_reduce(tag, tensor, op)
            case ReduceScatter():
                self._reduce_scatter(tag, operation)
            case AllGather(outputs=outputs, input=input):
                self._all_gather(tag, outputs, input)
            case Broadcast(tensor=tensor, src=src):
                self._broadcast(tag, tensor, src)
            case Exchange():
                self._exchange(tag, operation)
            case _:
                raise NotImplementedError(f"{operation!r} is no collective that it has")

    def _all_reduce(self, tag: int, tensor: Tensor, op: str) -> None:
        """Reduce ``tensor`` over ranks, in place."""
        peers, size = self._peers, self._peers.size
        if _is_one_round(tensor.nbytes, size):
            everyone = dict.fromkeys(peers.others, tensor)
            self._reduce_at_once(tag, everyone, tensor, [tensor], op)
            return
        # [1] my pieces of part r go to rank r, which [2] reduces them and [3] sends results to all.
        parts = [_pieces(tensor[start:stop]) for start, stop in _ranges(tensor, size)]
        deadline = peers.deadline()
        results = [
            peers.recv(piece, peer, tag | PHASE) for peer in peers.others for piece in parts[peer]
        ]
        sent = [peers.send(piece, peer, tag) for peer, piece in self._by_turns(parts)]  # [1]
        part = parts[peers.rank]
        for i in self._reduce_pieces(tag, part, part, op, deadline):  # [2]
            sent += [peers.send(part[i], peer, tag | PHASE) for peer in peers.others]  # [3]
        peers.wait(results + sent, deadline)

    def _reduce_scatter(self, tag: int, operation: ReduceScatter) -> None:
        """Reduce the parts for this rank of the inputs of all ranks."""
        peers, op = self._peers, operation.op
        target, inputs = operation.target(peers.rank), operation.input.split(operation.splits)
        longest = max(operation.splits)  # not that of this rank, so that all decide alike
        if _is_one_round(longest * target.itemsize, peers.size):
            self._reduce_at_once(tag, dict(enumerate(inputs)), inputs[peers.rank], [target], op)
        else:
            deadline = peers.deadline()
            parts = [_pieces(part) for part in inputs]
            sent = [peers.send(piece, peer, tag) for peer, piece in self._by_turns(parts)]
            pieces = self._reduce_pieces(tag, parts[peers.rank], _pieces(target), op, deadline)
            for _ in pieces:
                pass
            peers.wait(sent, deadline)
        if target is not operation.output:
            operation.output.copy_(target)

    def _all_gather(self, tag: int, outputs: Sequence[Tensor], input: Tensor) -> None:
        """Copy ``input`` of each rank into ``outputs`` of all; straight into place."""
        peers = self._peers
        deadline = peers.deadline()
        posted = [peers.recv(outputs[peer], peer, tag) for peer in peers.others]
        posted += [peers.send(input, peer, tag) for peer in peers.others]
        _copy(outputs[peers.rank], input)
        peers.wait(posted, deadline)

    def _broadcast(self, tag: int, tensor: Tensor, src: int) -> None:
        """Copy ``tensor`` of rank ``src`` to all."""
        peers = self._peers
        deadline = peers.deadline()
        receivers = [rank for rank in range(peers.size) if rank != src]
        if len(receivers) <= 1 or tensor.numel() * tensor.itemsize <= FLAT_BROADCAST_NBYTES:
            if peers.rank == src:
                peers.wait([peers.send(tensor, peer, tag) for peer in peers.others], deadline)
            else:
                peers.wait([peers.recv(tensor, src, tag)], deadline)
            return
        # The source gives a part to each receiver, and each receiver hands its part on.
        ranges = even_chunks(tensor.numel(), len(receivers), _ALIGN_NBYTES)
        parts = {
            rank: tensor[start:stop] for rank, (start, stop) in zip(receivers, ranges, strict=True)
        }
        if peers.rank == src:
            peers.wait([peers.send(parts[peer], peer, tag) for peer in peers.others], deadline)
            return
        others = [peer for peer in peers.others if peer != src]
        part = peers.recv(parts[peers.rank], src, tag)
        rest = [peers.recv(parts[peer], peer, tag) for peer in others]
        peers.wait([part], deadline)
        sent = [peers.send(parts[peers.rank], peer, tag) for peer in others]
        peers.wait(rest + sent, deadline)

    def _exchange(self, tag: int, operation: Exchange) -> None:
        """Send ``inputs[r]`` to rank ``r`` and receive ``outputs[r]`` from it.

        Unless ranks have agreed on the lengths, the tag of a message holds its length, and an empty
        tensor travels as one byte: two ranks that do not agree never meet, see [Note: tags].
        """
        peers, outputs, inputs = self._peers, operation.outputs, operation.inputs
        deadline = peers.deadline()

        def message(tensor: Tensor) -> tuple[Tensor, int]:
            if operation.lengths_agreed:
                return tensor, tag
            return tensor if tensor.numel() else self._token, sized_tag(tag, tensor.numel())

        posted = []
        for peer in peers.others:
            place, sized = message(outputs[peer])
            posted.append(peers.recv(place, peer, sized))
        for peer in peers.others:
            data, sized = message(inputs[peer])
            posted.append(peers.send(data, peer, sized))
        _copy(outputs[peers.rank], inputs[peers.rank])
        peers.wait(posted, deadline)

    @cached_property
    def _token(self) -> Tensor:
        """One byte for what has none; made when it is needed, as not every group needs it."""
        return torch.zeros(1, dtype=torch.uint8, device=self._device)

    # Parts of the above ----------------------------------------------------------------------

    def _by_turns(self, parts: Sequence[Sequence[Tensor]]) -> list[tuple[int, Tensor]]:
        """The pieces for the other ranks in the order of sending: the first of each, and so on."""
        others = self._peers.others
        longest = max((len(parts[peer]) for peer in others), default=0)
        return [
            (peer, parts[peer][i])
            for i in range(longest)
            for peer in others
            if i < len(parts[peer])
        ]

    def _reduce_at_once(
        self, tag: int, inputs: dict[int, Tensor], own: Tensor, outputs: list[Tensor], op: str
    ) -> None:
        """Send ``inputs[r]`` to rank ``r``, and reduce what comes with ``own``."""
        peers = self._peers
        deadline = peers.deadline()
        if not own.numel():  # as on all ranks but one in a reduce
            peers.wait([peers.send(inputs[peer], peer, tag) for peer in peers.others], deadline)
            return
        places = self._room(peers.size, own.numel(), own.dtype)
        places[peers.rank] = own
        posted = [peers.recv(places[peer], peer, tag) for peer in peers.others]
        posted += [peers.send(inputs[peer], peer, tag) for peer in peers.others]
        peers.wait(posted, deadline)  # before ``own``, which may be what is sent, is written
        reduce_into(outputs, places, op)

    def _reduce_pieces(
        self, tag: int, own: list[Tensor], outputs: list[Tensor], op: str, deadline: float
    ) -> Iterator[int]:
        """Receive every other rank's piece ``i`` and reduce it with ``own[i]`` into ``outputs[i]``.

        Yields:
            ``i``, when it is reduced.
        """
        peers = self._peers
        longest = max((piece.numel() for piece in own), default=0)
        dtype = own[0].dtype if own else torch.uint8
        depth = _depth(peers.size)
        room = self._room(min(depth, len(own)) * peers.size, longest, dtype)
        slots = [room[i : i + peers.size] for i in range(0, len(room), peers.size)]
        arriving: dict[int, list[Posted]] = {}

        def expect(i: int) -> None:
            places = slots[i % depth]
            arriving[i] = [
                peers.recv(places[peer][: own[i].numel()], peer, tag) for peer in peers.others
            ]

        for i in range(min(depth, len(own))):
            expect(i)
        for i, piece in enumerate(own):
            peers.wait(arriving.pop(i), deadline)
            places = [place[: piece.numel()] for place in slots[i % depth]]
            places[peers.rank] = piece
            reduce_into([outputs[i]], places, op)
            if i + depth < len(own):
                expect(i + depth)
            yield i

    def _room(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """``count`` places of ``numel`` elements in the scratch memory, which only ever grows."""
        nbytes = _aligned(numel * dtype.itemsize)
        if self._scratch.numel() < count * nbytes:
            self._scratch = self._scratch.new_empty(count * nbytes)
        return [
            self._scratch[i * nbytes : i * nbytes + numel * dtype.itemsize].view(dtype)
            for i in range(count)
        ]


def scratch_nbytes(operation: Primitive | Derived, rank: int, size: int) -> int:
    """The scratch memory that a rank needs for an operation; it keeps the most of all so far.

    Example:
        >>> scratch_nbytes(AllReduce(torch.zeros(16), "sum"), 0, 2)
        128
    """
    match operation:
        case AllReduce(tensor=tensor):
            start, stop = _ranges(tensor, size)[rank]
            longest, numel = tensor.numel(), stop - start
            whole = longest
        case ReduceScatter(input=tensor, splits=splits):
            longest, numel = max(splits), splits[rank]
            whole = numel
        case _:
            return 0
    if _is_one_round(longest * tensor.itemsize, size):
        return size * _aligned(whole * tensor.itemsize)
    most = PIECE_NBYTES // tensor.itemsize
    num_pieces = -(-numel // most)
    return min(_depth(size), num_pieces) * size * _aligned(min(numel, most) * tensor.itemsize)


def _is_one_round(nbytes: int, size: int) -> bool:
    """Whether each rank sends so much to all others at once."""
    return (size - 1) * nbytes <= ONE_ROUND_NBYTES


def _ranges(tensor: Tensor, size: int) -> list[tuple[int, int]]:
    """The part of a tensor that each rank reduces."""
    return even_chunks(tensor.numel(), size, max(1, _ALIGN_NBYTES // tensor.itemsize))


def _depth(size: int) -> int:
    """How many pieces may be under way to a rank from each other one."""
    return max(2, SCRATCH_NBYTES // (max(1, size - 1) * PIECE_NBYTES))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN_NBYTES) * _ALIGN_NBYTES


def _pieces(part: Tensor) -> list[Tensor]:
    """``part`` cut into messages; none if it is empty."""
    return list(part.split(PIECE_NBYTES // part.itemsize)) if part.numel() else []


def _copy(output: Tensor, input: Tensor) -> None:
    """Copy what a rank sends to itself, unless it is there already."""
    if output.numel() != input.numel():
        raise ArgumentError(
            f"this rank sends itself {input.numel()} elements and expects {output.numel()}"
        )
    if output.data_ptr() != input.data_ptr():
        output.copy_(input)
