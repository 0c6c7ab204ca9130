"""The norm of all gradients as one vector, of which each rank may have parts.

[Note: norms of parts]
The p-th power of the norm of order p of a vector is the sum of those powers of its parts, and the
largest magnitude (p = inf) is the largest of all parts. So each rank takes one norm of its parts,
and one all-reduce combines one number for each vector. It is done in float64, because powers of a
float32 number may be too large or too small for float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from echelon.checks import number

LABEL = "norm of the gradients"


class ReducingRanks(Protocol):
    """The ranks of a group."""

    @property
    def device(self) -> torch.device:
        """The device of the tensors that they reduce."""

    def all_reduce(
        self, tensor: Tensor, op: str = ..., async_op: bool = ..., *, label: str | None = ...
    ) -> Any:
        """Replace ``tensor`` by its reduction over the ranks."""


def check_order(norm_type: object) -> float:
    """The order of a norm that users ask for: a number from 1 up, or ``math.inf``."""
    return number("norm_type", norm_type, 1.0, math.inf)


def by_kind(gradients: Iterable[Tensor]) -> list[list[Tensor]]:
    """Gradients that one fused call can take, in order of first appearance."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(kinds.values())


def local_norm(
    gradients: Iterable[Tensor],
    order: float,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The norm of the gradients of this rank, none of them empty; a scalar, 0 without any.

    Gradients are combined in the given order. The result has the widest of their dtypes and the
    device of the first of them where ``dtype`` and ``device`` are None. With a ``dtype`` the norms
    of gradients of 16 bits are not rounded to these.
    """
    gradients = list(gradients)
    if not gradients:
        return torch.zeros((), dtype=dtype, device=device)
    norm_of = {
        id(gradient): norm
        for kind in by_kind(gradients)
        for gradient, norm in zip(kind, _norms(kind, order, dtype is not None), strict=True)
    }
    norms = [norm_of[id(gradient)] for gradient in gradients]
    widest = norms[0].dtype
    for norm in norms:
        widest = torch.promote_types(widest, norm.dtype)
    # Where gradients are on the host, only their norms go to the device, and all at once.
    parts = torch.stack([norm.to(norms[0].device, widest) for norm in norms])
    parts = parts.to(device, widest if dtype is None else dtype)
    total: Tensor = torch.linalg.vector_norm(parts, order)
    return total


def _norms(gradients: list[Tensor], order: float, wide: bool) -> Sequence[Tensor]:
    """The norms of gradients of one dtype; ``wide``: in float32 at least."""
    is_narrow = wide and gradients[0].dtype in (torch.bfloat16, torch.float16)
    return torch._foreach_norm(gradients, order, torch.float32 if is_narrow else None)


def norms_over_ranks(
    norms: Tensor, order: float, ranks: ReducingRanks, label: str, everywhere: Tensor | None = None
) -> Tensor:
    """The norms of vectors of which each rank has a part. All ranks call it.

    ``norms`` are those of this rank's parts, float64, one for each vector; they are overwritten.
    ``everywhere`` are norms of further parts that all ranks have, so they count once.
    """
    if math.isinf(order):
        ranks.all_reduce(norms, "max", label=label)
        return norms if everywhere is None else torch.maximum(norms, everywhere)
    powers = norms.pow_(order)
    ranks.all_reduce(powers, "sum", label=label)
    if everywhere is not None:
        powers = powers + everywhere**order
    return powers.pow_(1 / order)


def norm_over_shards(
    sharded: Iterable[Tensor], replicated: Iterable[Tensor], order: float, ranks: ReducingRanks
) -> Tensor:
    """The norm of gradients of which each rank has shards, and of others that all ranks have."""
    shards, copies = (
        local_norm(gradients, order, dtype=torch.float64, device=ranks.device)
        for gradients in (sharded, replicated)
    )
    return norms_over_ranks(shards, order, ranks, LABEL, everywhere=copies)
