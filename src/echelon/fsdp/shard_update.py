"""Values that users give for all shards of a rank in one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.errors import ArgumentError


def shard_update(flat: Tensor, shards: Sequence[Tensor]) -> Callable[[], None]:
    """What writes ``flat`` into the shards, end to end; an ArgumentError if they cannot hold it."""
    numels = [shard.numel() for shard in shards]
    numel = sum(numels)
    if flat.numel() != numel:
        raise ArgumentError(f"update_shards: expected {numel} elements but got {flat.numel()}")
    _check_values(flat, shards)

    def write() -> None:
        with torch.no_grad():
            for shard, value in zip(shards, flat.reshape(-1).split(numels), strict=True):
                shard.copy_(value.view(shard.shape))

    return write


def _check_values(flat: Tensor, shards: Sequence[Tensor]) -> None:
    """Refuse values that lose something in the dtypes of the shards."""
    for dtype in {shard.dtype for shard in shards}:
        if flat.dtype.is_complex and not dtype.is_complex:
            raise ArgumentError(
                f"update_shards: {flat.dtype} values have imaginary parts, which {dtype} shards "
                "cannot hold: give flat.real"
            )
        is_integer = not (flat.dtype.is_floating_point or flat.dtype.is_complex)
        if is_integer and not torch.equal(flat.to(dtype).to(flat.dtype), flat):
            raise ArgumentError(
                f"update_shards: {dtype} shards cannot hold all of the {flat.dtype} values: give "
                "floating-point values"
            )
