"""The five collectives and two messages that a transport implements.

The tensors of a primitive are 1D, contiguous and on the device of the group. Each function checks
the arguments of a call of ``Group`` and returns the call as a ``Request``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from echelon.comm import reduce_op
from echelon.comm.buffers import disjoint_input, flattened, overlap
from echelon.comm.call_arguments import Arguments
from echelon.diagnosis.collective_call import CallSignature, signature_of


@dataclass(slots=True)
class AllReduce:
    """Replace ``tensor`` of every rank by the reduction over ranks."""

    tensor: Tensor
    op: str


@dataclass(slots=True)
class ReduceScatter:
    """Reduce ``input`` over ranks and write this rank's part of the result to ``output``.

    Attributes:
        output: may overlap ``input``.
        splits: the number of elements of each rank's part, the same on all ranks.
    """

    output: Tensor
    input: Tensor
    splits: list[int]
    op: str

    def target(self, rank: int) -> Tensor:
        """``output``, or a temporary buffer if ``output`` overlaps the parts of other ranks.

        Peers may not have read these parts yet. Copy the buffer to ``output`` when they have.
        """
        output, input = self.output, self.input
        own = input.data_ptr() + sum(self.splits[:rank]) * input.itemsize
        if output.data_ptr() == own or not overlap(output, input):
            return output
        return torch.empty_like(output)


@final
class EqualParts(Sequence[Tensor]):
    """``flat`` cut into ``count`` equal parts, one per rank, which are made when somebody asks.

    An engine of torch takes ``flat`` as it is; to cut it for 8 ranks takes 5 µs.
    """

    __slots__ = ("_count", "_parts", "flat")

    def __init__(self, flat: Tensor, count: int) -> None:
        self.flat, self._count = flat, count
        self._parts: Sequence[Tensor] = ()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all())

    def _all(self) -> Sequence[Tensor]:
        if not self._parts:
            flat, count = self.flat, self._count
            self._parts = flat.view(count, -1).unbind(0) if flat.numel() else [flat] * count
        return self._parts


@dataclass(slots=True)
class AllGather:
    """Copy ``input`` of rank r into ``outputs[r]`` of all ranks; lengths may differ.

    Attributes:
        input: does not overlap ``outputs``, or is exactly the output of this rank.
    """

    outputs: Sequence[Tensor]
    input: Tensor


@dataclass(slots=True)
class Broadcast:
    """Copy ``tensor`` of rank ``src`` to all ranks."""

    tensor: Tensor
    src: int


@dataclass(slots=True)
class Exchange:
    """Send ``inputs[r]`` to rank r and receive ``outputs[r]`` from it; lengths may differ.

    Attributes:
        lengths_agreed: whether all ranks know all lengths from the signature of the call. If not,
            the transport checks that each rank sends as much as its peer expects.
    """

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    lengths_agreed: bool


@dataclass(slots=True)
class Send:
    """Send ``tensor`` to rank ``dst``."""

    tensor: Tensor
    dst: int
    tag: int


@dataclass(slots=True)
class Receive:
    """Receive the next message of rank ``src`` with this tag into ``tensor``."""

    tensor: Tensor
    src: int
    tag: int


Message: TypeAlias = Send | Receive
Primitive: TypeAlias = AllReduce | ReduceScatter | AllGather | Broadcast | Exchange | Message


class Derived:
    """A collective that is implemented by a primitive."""

    __slots__ = ()

    def primitive(self, rank: int, size: int) -> Primitive:
        """The primitive of this rank; it is of the same type on all ranks."""
        raise NotImplementedError


# A checked call: its signature, its operation, and the steps that run after the wait, such as
# copying results to tensors that are not contiguous. A plain tuple is the fastest to make.
Finish: TypeAlias = Sequence[Callable[[], None]]
Request: TypeAlias = tuple[CallSignature, Primitive | Derived, Finish]


def all_reduce(arguments: Arguments, tensor: Tensor, op: str, label: str | None) -> Request:
    """See ``Group.all_reduce``."""
    reduce_op.check_op(op, arguments.check_call("all_reduce", label, written=[tensor]))
    signature = signature_of("all_reduce", tensor.dtype, tensor.shape, op, None, label)
    flat, finish = flattened(tensor)
    return signature, AllReduce(flat, op), finish


def reduce_scatter(
    arguments: Arguments,
    output: Tensor,
    input: Tensor,
    op: str,
    splits: Sequence[int] | None,
    label: str | None,
) -> Request:
    """See ``Group.reduce_scatter_single``."""
    name = "reduce_scatter_single"
    reduce_op.check_op(op, arguments.check_call(name, label, [input], [output]))
    parts: tuple[int, ...] = ()
    if splits is None:
        size = arguments.size
        arguments.check_numel("input", input, size * output.numel(), "size * output.numel()")
        lengths = [output.numel()] * size
    else:
        rank = arguments.rank
        lengths = arguments.splits("input", input, splits)
        arguments.check_numel("output", output, lengths[rank], f"splits[{rank}]")
        parts = tuple(lengths)
    signature = signature_of(name, input.dtype, input.shape, op, None, label, parts)
    flat, finish = flattened(output)
    return signature, ReduceScatter(flat, flattened(input)[0], lengths, op), finish


def all_gather_single(
    arguments: Arguments, output: Tensor, input: Tensor, label: str | None
) -> Request:
    """See ``Group.all_gather_single``."""
    name, size = "all_gather_single", arguments.size
    arguments.check_call(name, label, [input], [output])
    arguments.check_numel("output", output, size * input.numel(), "size * input.numel()")
    signature = signature_of(name, input.dtype, input.shape, None, None, label)
    flat, finish = flattened(output)
    in_place = flat.data_ptr() + arguments.rank * input.nbytes
    source = disjoint_input(flattened(input)[0], [flat], in_place)
    return signature, AllGather(EqualParts(flat, size), source), finish


def all_gather(
    arguments: Arguments, outputs: Sequence[Tensor], input: Tensor, label: str | None
) -> Request:
    """See ``Group.all_gather``."""
    arguments.outputs_of_ranks("all_gather", label, outputs, input)
    lengths = tuple(output.numel() for output in outputs)
    signature = signature_of("all_gather", input.dtype, (sum(lengths),), None, None, label, lengths)
    flats, steps = zip(*map(flattened, outputs), strict=True)
    source = disjoint_input(flattened(input)[0], flats, flats[arguments.rank].data_ptr())
    return signature, AllGather(flats, source), tuple(chain.from_iterable(steps))


def broadcast(arguments: Arguments, tensor: Tensor, src: int, label: str | None) -> Request:
    """See ``Group.broadcast``."""
    arguments.check_rank("src", src)
    read, written = ([tensor], []) if src == arguments.rank else ([], [tensor])
    arguments.check_call("broadcast", label, read, written)
    signature = signature_of("broadcast", tensor.dtype, tensor.shape, None, src, label)
    flat, finish = flattened(tensor)
    return signature, Broadcast(flat, src), finish


def all_to_all_single(
    arguments: Arguments,
    output: Tensor,
    input: Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    label: str | None,
) -> Request:
    """See ``Group.all_to_all_single``."""
    arguments.check_call("all_to_all_single", label, [input], [output])
    outs = arguments.rows("output", output, output_splits)
    ins = arguments.rows("input", input, input_splits)
    signature = signature_of("all_to_all_single", input.dtype, (), None, None, label)
    flat, finish = flattened(output)
    source = disjoint_input(flattened(input)[0], [flat])
    operation = Exchange(flat.split(outs), source.split(ins), lengths_agreed=False)
    return signature, operation, finish


def send(arguments: Arguments, tensor: Tensor, dst: int, tag: int) -> Request:
    """See ``Group.send``."""
    arguments.check_call("send", None, [tensor])
    arguments.check_peer("send", "dst", dst, tag)
    signature = signature_of("send", tensor.dtype, (tensor.numel(),), None, dst, f"tag {tag}")
    return signature, Send(flattened(tensor)[0], dst, tag), ()


def receive(arguments: Arguments, tensor: Tensor, src: int, tag: int) -> Request:
    """See ``Group.recv``."""
    arguments.check_call("recv", None, written=[tensor])
    arguments.check_peer("recv", "src", src, tag)
    signature = signature_of("recv", tensor.dtype, (tensor.numel(),), None, src, f"tag {tag}")
    flat, finish = flattened(tensor)
    return signature, Receive(flat, src, tag), finish
