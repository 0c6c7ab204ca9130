"""The reductions: which operations each dtype has, and in which order sums run.

All backends that reduce on their own use ``reduce_into``, so they give the same bits. Parts are
combined in rank order, bfloat16 and float16 are accumulated in float32 and rounded once, and a mean
is the sum followed by one division.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.comm.streams import device_of
from echelon.errors import ArgumentError

_Combine = Callable[..., Tensor]

_COMBINE: dict[str, _Combine] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}

OPS = tuple(_COMBINE)

# 64 Ki elements of float32 are 256 KiB: the parts and the result of a block fit into an L2 cache.
BLOCK_NUMEL = 1 << 16

_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
)
_NARROW = (torch.bfloat16, torch.float16, *_FLOAT8)

# torch has no arithmetic for these dtypes. In two's complement, sums and products have the bits of
# signed ones.
_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def check_op(op: str, dtype: torch.dtype) -> None:
    """Refuse a reduction that is unknown or has no meaning for a dtype.

    For bool, sum and max are "or", and product and min are "and".
    """
    if not isinstance(op, str) or op not in _COMBINE:
        raise ArgumentError(f"unknown reduction {op!r:.80}: use one of {', '.join(OPS)}")
    if op == "mean" and not (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(
            f"the mean of {dtype} tensors is not a {dtype}: use op='sum' and divide"
        )
    if op in ("min", "max") and dtype.is_complex:
        raise ArgumentError(f"{op} has no meaning for {dtype}: complex numbers have no order")
    if op in ("band", "bor", "bxor") and (dtype.is_floating_point or dtype.is_complex):
        raise ArgumentError(f"{op} has no meaning for {dtype}: use an integer or bool tensor")


def divide_for_mean(tensor: Tensor, size: int) -> None:
    """Turn the sum of ``size`` ranks into their mean, in place."""
    if size == 1:
        return
    if size & (size - 1) == 0 and tensor.is_floating_point():
        tensor.mul_(1 / size)  # for a power of two the same bits as the division, and faster
    else:
        tensor.div_(size)


def reduce_into(outputs: Sequence[Tensor], parts: Sequence[Tensor], op: str) -> None:
    """Reduce ``parts`` in their order and write the result to each of ``outputs``.

    All are 1D and have one length and dtype. An output may be one of the parts, but must not
    overlap a part otherwise. On the CPU the reduction works block by block, so that each block is
    read from memory once; on a device every block would be kernels of its own.

    Example:
        >>> out = torch.empty(2)
        >>> reduce_into([out], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])], "mean")
        >>> out
        tensor([2., 3.])
    """
    dtype = parts[0].dtype
    if dtype in _SIGNED:
        _reduce_unsigned(outputs, parts, op, _SIGNED[dtype])
        return
    numel = parts[0].numel()
    if numel <= BLOCK_NUMEL or not device_of(parts[0].device).is_host:
        _reduce_block(outputs, parts, op)
        return
    num_outputs = len(outputs)
    blocks = (tensor.split(BLOCK_NUMEL) for tensor in (*outputs, *parts))
    for block in zip(*blocks, strict=True):
        _reduce_block(block[:num_outputs], block[num_outputs:], op)


def _reduce_block(outputs: Sequence[Tensor], parts: Sequence[Tensor], op: str) -> None:
    first, *others = outputs
    narrow = parts[0].dtype in _NARROW
    if len(parts) == 1:
        total = parts[0]
    elif narrow and (op in ("sum", "mean", "product") or parts[0].dtype in _FLOAT8):
        total = parts[0].float()
        for part in parts[1:]:
            _COMBINE[op](total, part.float(), out=total)
    elif len(parts) == 2:
        total = _COMBINE[op](parts[0], parts[1], out=first)
    else:  # ``first`` may be a part that has not been read yet, so the total is a new block
        total = _COMBINE[op](parts[0], parts[1])
        for part in parts[2:]:
            _COMBINE[op](total, part, out=total)
    if op == "mean":
        divide_for_mean(total, len(parts))
    if total is not first:
        first.copy_(total)
    for output in others:
        output.copy_(first)


def _reduce_unsigned(
    outputs: Sequence[Tensor], parts: Sequence[Tensor], op: str, signed: torch.dtype
) -> None:
    views = [part.view(signed) for part in parts]
    outs = [output.view(signed) for output in outputs]
    if op not in ("min", "max"):
        reduce_into(outs, views, op)
        return
    # Flipping the sign bit maps unsigned order to signed order, and back.
    sign = torch.iinfo(signed).min
    reduce_into(outs[:1], [view ^ sign for view in views], op)
    outs[0].bitwise_xor_(sign)
    for out in outs[1:]:
        out.copy_(outs[0])
