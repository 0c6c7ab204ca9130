"""What c10d says, in our words: reductions, timeouts, lists of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from echelon.comm.buffers import writable
from echelon.errors import ArgumentError

UNSET = timedelta(0)

_REDUCTIONS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "mean",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class C10dOptions(Protocol):
    """What the options of all collectives of c10d have in common."""

    timeout: timedelta
    asyncOp: bool


def seconds_of(timeout: timedelta) -> float | None:
    """A timeout of c10d in seconds; None where it is unset, which c10d writes as 0 or -1 ms.

    Example:
        >>> seconds_of(timedelta(minutes=1)), seconds_of(timedelta(0))
        (60.0, None)
    """
    return timeout.total_seconds() if timeout > UNSET else None


def reduction(op: ReduceOp, tensors: Sequence[Tensor]) -> tuple[str, list[Tensor]]:
    """Our name of a reduction, and what to reduce.

    Returns:
        The name and the tensors; scaled copies of them where c10d scales before it sums.

    Raises:
        ArgumentError: c10d has a reduction that we do not know.
    """
    kind = op.op  # type: ignore[attr-defined]  # torch's annotations lack it
    if kind == ReduceOp.PREMUL_SUM:
        _, factor = cast(tuple[object, float], op.__getstate__())  # torch 2.11 has no other access
        return "sum", [tensor.detach() * factor for tensor in tensors]
    if kind not in _REDUCTIONS:
        raise ArgumentError(f"{kind} is not one of {', '.join(_REDUCTIONS.values())}")
    return _REDUCTIONS[kind], list(tensors)


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """A new buffer with the elements of all tensors, end to end: 1D."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def joined_by_dtype(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[list[Tensor], Callable[[], None]]:
    """A buffer for each dtype with the elements of its sources, and what copies them to targets."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, source in enumerate(sources):
        by_dtype.setdefault(source.dtype, []).append(place)
    buffers = [joined([sources[place] for place in places]) for places in by_dtype.values()]

    def copy_back() -> None:
        for buffer, places in zip(buffers, by_dtype.values(), strict=True):
            of_dtype = [targets[place] for place in places]
            copy_all(of_dtype, buffer.split([target.numel() for target in of_dtype]))

    return buffers, copy_back


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its target, which has as many elements and may be the same tensor."""
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            writable(target).copy_(source.view(target.shape))


def divide_integers(tensors: Sequence[Tensor], size: int) -> None:
    """Turn sums over ranks into means in place, rounded toward zero as by NCCL.

    Lightning asks for such means of its counts of samples.
    """
    for tensor in tensors:
        writable(tensor).div_(size, rounding_mode="trunc")
