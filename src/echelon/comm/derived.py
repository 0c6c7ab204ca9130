"""The collectives that are made of primitives, once for all transports.

Law: a derived collective gives the bits of its primitive, so its sums run in rank order, too.

A transport that has a faster implementation of one names it in ``Transport.overrides``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import final

import torch
from torch import Tensor

from echelon.comm import reduce_op
from echelon.comm.buffers import disjoint_input, flattened
from echelon.comm.call_arguments import Arguments
from echelon.comm.primitives import AllReduce, Derived, Exchange, ReduceScatter, Request
from echelon.comm.streams import device_of
from echelon.diagnosis.collective_call import CallSignature, signature_of


@final
@dataclass(slots=True)
class Reduce(Derived):
    """Reduce over ranks into ``tensor`` of rank ``dst``; other ranks' tensors stay as is."""

    tensor: Tensor
    dst: int
    op: str

    def primitive(self, rank: int, size: int) -> ReduceScatter:
        """A reduce-scatter in which ``dst`` gets everything and the other ranks get nothing."""
        tensor, splits = self.tensor, [0] * size
        splits[self.dst] = tensor.numel()
        output = tensor if rank == self.dst else _empty(tensor.dtype, tensor.device)
        return ReduceScatter(output, tensor, splits, self.op)


@final
@dataclass(slots=True)
class Gather(Derived):
    """Copy ``tensor`` of rank r to ``outputs[r]`` of rank ``dst``."""

    outputs: Sequence[Tensor]
    tensor: Tensor
    dst: int

    def primitive(self, rank: int, size: int) -> Exchange:
        """An exchange in which all ranks send to ``dst`` only."""
        nothing = _empty(self.tensor.dtype, self.tensor.device)
        inputs = [nothing] * size
        inputs[self.dst] = self.tensor
        outputs = self.outputs if rank == self.dst else [nothing] * size
        return Exchange(outputs, inputs, lengths_agreed=True)


@final
@dataclass(slots=True)
class Scatter(Derived):
    """Copy ``inputs[r]`` of rank ``src`` to ``tensor`` of rank r."""

    tensor: Tensor
    inputs: Sequence[Tensor]
    src: int

    def primitive(self, rank: int, size: int) -> Exchange:
        """An exchange in which only ``src`` sends."""
        nothing = _empty(self.tensor.dtype, self.tensor.device)
        outputs = [nothing] * size
        outputs[self.src] = self.tensor
        inputs = self.inputs if rank == self.src else [nothing] * size
        return Exchange(outputs, inputs, lengths_agreed=True)


@final
@dataclass(slots=True)
class Barrier(Derived):
    """Return when all ranks have started the barrier."""

    device: torch.device

    def primitive(self, rank: int, size: int) -> AllReduce:
        """A reduction of one element, which needs the elements of all ranks."""
        return AllReduce(torch.zeros(1, dtype=torch.int32, device=self.device), "sum")


@lru_cache(maxsize=256)
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 1D tensor without elements, for ranks that send or receive nothing."""
    with torch.inference_mode(False):  # the cache outlives the caller's mode
        return torch.empty(0, dtype=dtype, device=device)


def reduce(arguments: Arguments, tensor: Tensor, dst: int, op: str, label: str | None) -> Request:
    """See ``Group.reduce``."""
    arguments.check_rank("dst", dst)
    reduce_op.check_op(op, arguments.check_call("reduce", label, written=[tensor]))
    signature = signature_of("reduce", tensor.dtype, tensor.shape, op, dst, label)
    flat, finish = flattened(tensor)
    return signature, Reduce(flat, dst, op), finish


def gather(
    arguments: Arguments,
    tensor: Tensor,
    outputs: Sequence[Tensor] | None,
    dst: int,
    label: str | None,
) -> Request:
    """See ``Group.gather``."""
    arguments.check_rank("dst", dst)
    targets = arguments.list_of_root("gather", "outputs", outputs, root=dst)
    arguments.check_call("gather", label, [tensor], targets)
    arguments.check_numels("gather", "outputs", targets, tensor)
    signature = signature_of("gather", tensor.dtype, tensor.shape, None, dst, label)
    pairs = [flattened(target) for target in targets]
    flats = [flat for flat, _ in pairs]
    input = disjoint_input(flattened(tensor)[0], flats, flats[dst].data_ptr() if flats else None)
    operation = Gather(flats, input, dst)
    return signature, operation, tuple(step for _, steps in pairs for step in steps)


def scatter(
    arguments: Arguments,
    tensor: Tensor,
    inputs: Sequence[Tensor] | None,
    src: int,
    label: str | None,
) -> Request:
    """See ``Group.scatter``."""
    arguments.check_rank("src", src)
    sources = arguments.list_of_root("scatter", "inputs", inputs, root=src)
    arguments.check_call("scatter", label, sources, [tensor])
    arguments.check_numels("scatter", "inputs", sources, tensor)
    signature = signature_of("scatter", tensor.dtype, tensor.shape, None, src, label)
    flat, finish = flattened(tensor)
    parts = [flattened(source)[0] for source in sources]
    # The part of this rank may be ``tensor`` itself; the parts of peers must not change.
    parts = [p if rank == src else disjoint_input(p, [flat]) for rank, p in enumerate(parts)]
    return signature, Scatter(flat, parts, src), finish


def barrier(arguments: Arguments, label: str | None) -> Request:
    """See ``Group.barrier``."""
    request = _barrier(arguments.device, arguments.on_host)
    if label is None:
        return request
    arguments.check_label(label)
    return signature_of("barrier", None, (), None, None, label), *request[1:]


@lru_cache(maxsize=64)
def _barrier(device: torch.device, on_host: bool) -> Request:
    # On CUDA a wait only orders streams, but a barrier must block the host.
    finish = () if on_host else (partial(_synchronize, device),)
    return CallSignature("barrier"), Barrier(device), finish


def _synchronize(device: torch.device) -> None:
    device_of(device).synchronize()
