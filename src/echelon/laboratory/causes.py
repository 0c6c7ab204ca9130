"""Causes of differences by their signature: pure functions of numbers that were computed before.

A signature is an equation that holds for this cause and for no other. Where none holds, there is no
cause: a wrong one would cost more than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isclose
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.laboratory.comparison import Cause, CauseKind, listed
from echelon.laboratory.seen_rows import AlikeStreams, Coverage

CLOSE = 1e-6  # relative; other causes differ by far more, and rounding by far less
_LOWER = (torch.bfloat16, torch.float16, torch.float32)
_FEW = 4  # elements that say nothing about a dtype
_MOST_ROUNDINGS = 16.0  # of a lower dtype, by which a value may be wrong
_MOST_LISTED = 6


class Proportion(NamedTuple):
    """How many times one vector another one is, and how far off that is, relatively."""

    factor: float
    error: float


def proportion(observed: Sequence[Tensor], other: Sequence[Tensor]) -> Proportion:
    """The factor that brings ``other`` nearest to ``observed``, over all tensors together.

    Example:
        >>> proportion([torch.tensor([2.0, 4.0])], [torch.tensor([1.0, 2.0])])
        Proportion(factor=2.0, error=0.0)
    """
    a = torch.cat([tensor.double().reshape(-1) for tensor in observed])
    b = torch.cat([tensor.double().reshape(-1) for tensor in other])
    if not (a.isfinite().all() and b.isfinite().all() and b.any() and a.any()):
        return Proportion(0.0, torch.inf)
    factor = float(a @ b / (b @ b))
    return Proportion(factor, float((a - factor * b).norm() / a.norm()))


def equal(observed: Sequence[Tensor], other: Sequence[Tensor | None], close: float = CLOSE) -> bool:
    """Whether vectors are equal, but for rounding: to the part ``close`` of their norm."""
    known = [tensor for tensor in other if tensor is not None]
    if [tensor.numel() for tensor in known] != [tensor.numel() for tensor in observed]:
        return False
    factor, error = proportion(observed, known)
    return error <= close and isclose(factor, 1.0, rel_tol=close)


def lower_precision(observed: Tensor, expected: Tensor) -> torch.dtype | None:
    """The dtype through which a value went, if its elements are numbers of a lower one.

    Example:
        >>> exact = torch.linspace(0, 1, 9, dtype=torch.float64) / 3
        >>> lower_precision(exact.float().double(), exact)
        torch.float32
    """
    if observed.dtype in _LOWER and expected.dtype is torch.float64:
        return observed.dtype
    a, b = observed.double().reshape(-1), expected.double().reshape(-1)
    if not (a.isfinite().all() and b.isfinite().all()):
        return None
    changed = b[a != b]  # elements that tell something: numbers such as 0 and 1 are of all dtypes
    if changed.numel() < _FEW:
        return None
    for dtype in _LOWER:
        error = torch.finfo(dtype).eps * _MOST_ROUNDINGS * float(b.abs().max())
        is_near = float((a - b).abs().max()) <= error
        is_rounded = torch.equal(a, a.to(dtype).double())
        if is_near and is_rounded and not torch.equal(changed, changed.to(dtype).double()):
            return dtype
    return None


def precision_cause(dtype: torch.dtype, what: str) -> Cause:
    """That a value went through a lower dtype."""
    return Cause(
        kind=CauseKind.PRECISION,
        text=f"all elements of {what} are numbers of {dtype}",
        advice=f"Find the cast to {dtype}, such as autocast, a communication hook or a fixed dtype",
    )


def samples_cause(coverage: Coverage) -> Cause:
    """That rows were seen twice or never."""
    return Cause(
        kind=CauseKind.SAMPLES,
        text=coverage_text(coverage),
        advice="Give each rank its own rows of the same order of samples, without padding or "
        "dropping",
    )


def stream_cause(streams: AlikeStreams) -> Cause:
    """That ranks drew the same random numbers for different rows."""
    first, second = streams.ranks
    who = f"ranks {first} and {second}" if first != second else f"two forwards of rank {first}"
    how = "nobody seeded them" if streams.is_initial else "they were seeded alike"
    return Cause(
        kind=CauseKind.RANDOM_STREAM,
        text=f"{who} drew the same random numbers for different rows, because {how}",
        advice="Seed each rank by its number after the model is built: "
        "torch.manual_seed(seed + rank)",
    )


def coverage_text(coverage: Coverage) -> str:
    """Which rows were seen twice or never."""
    texts = []
    if coverage.never:
        texts.append(f"rows {shortened(coverage.never)} were seen by no rank")
    if coverage.repeated:
        rows = [
            f"{row} (ranks {', '.join(map(str, ranks))})"
            for row, ranks in coverage.repeated.items()
        ]
        texts.append(f"rows {shortened(rows)} were seen more than once")
    if coverage.foreign:
        rows = [f"{row} of batch {batch}" for batch, row in coverage.foreign]
        texts.append(f"rows of other steps were seen: {shortened(rows)}")
    return "; ".join(texts)


def shortened(items: Sequence[object]) -> str:
    """The first items, more than of names, and how many there are besides."""
    return listed(items, _MOST_LISTED)
