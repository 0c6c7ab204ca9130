"""Which ranks get values of which others in a call, as its meaning says, whatever moves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from echelon.comm.derived import Reduce
from echelon.comm.primitives import (
    AllGather,
    AllReduce,
    Broadcast,
    Exchange,
    Receive,
    ReduceScatter,
    Send,
)


class DataMove(NamedTuple):
    """Values of one rank that another gets, by themselves or in a sum.

    Attributes:
        src: whose values they are; ranks in the job.
        dst: who gets them.
        nbytes: how many bytes.
    """

    src: int
    dst: int
    nbytes: int


class OperationTensors(NamedTuple):
    """The tensors of a call on one rank, 1D.

    Attributes:
        inputs: what it gives; with several ranks' parts, in rank order.
        outputs: where it gets the result; the same objects where that is in place.
    """

    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]

    @property
    def in_place(self) -> bool:
        """Whether the result replaces what is given."""
        return self.inputs is self.outputs


_TENSORS: dict[type, Callable[[Any], OperationTensors]] = {
    ReduceScatter: lambda op: OperationTensors(op.input.split(op.splits), [op.output]),
    AllGather: lambda op: OperationTensors([op.input], op.outputs),
    Exchange: lambda op: OperationTensors(op.inputs, op.outputs),
}
_IN_PLACE = (AllReduce, Broadcast, Reduce, Send, Receive)


def tensors_of(operation: object) -> OperationTensors | None:
    """The tensors of an operation; None of one that moves no values, such as a barrier."""
    if isinstance(operation, _IN_PLACE):
        tensors = [operation.tensor]
        return OperationTensors(tensors, tensors)
    read = _TENSORS.get(type(operation))
    return None if read is None else read(operation)


def moves_of(ranks: Sequence[int], operations: Sequence[object]) -> list[DataMove]:
    """What moves between different ranks, by source and destination.

    Args:
        ranks: that take part, in the job.
        operations: of these ranks; of a message, the send and the receive.
    """
    first = operations[0]
    if isinstance(first, Send):
        return [DataMove(ranks[0], ranks[1], first.tensor.nbytes)]
    if tensors_of(first) is None:
        return []
    moves = []
    for i, src in enumerate(ranks):
        for j, dst in enumerate(ranks):
            nbytes = _nbytes(operations[i], i, j)
            if i != j and nbytes:
                moves.append(DataMove(src, dst, nbytes))
    return moves


def _nbytes(operation: object, src: int, dst: int) -> int:
    """What rank ``src`` of the group, whose operation it is, gives to rank ``dst``."""
    match operation:
        case AllReduce():
            return operation.tensor.nbytes
        case AllGather():
            return operation.input.nbytes
        case Broadcast():
            return operation.tensor.nbytes if src == operation.src else 0
        case Reduce():
            return operation.tensor.nbytes if dst == operation.dst else 0
        case ReduceScatter():
            return operation.splits[dst] * operation.input.itemsize
    return cast(Exchange, operation).inputs[dst].nbytes
