"""A batch in microbatches: what is cut, how large the parts are, and what each one counts.

Every tensor in the arguments is cut along dim 0, the first parts one row longer where it does not
come out even; what is no tensor goes to every microbatch. A mean over the whole batch is the sum of
the means of the parts, each weighted by its share of the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from echelon.errors import ArgumentError
from echelon.ranges import shard_range


@final
@dataclass(frozen=True, slots=True)
class Microbatches:
    """The parts of one batch.

    Attributes:
        parts: one nested structure each, like the whole.
        rows: length of dim 0 of each part.
    """

    parts: tuple[Any, ...]
    rows: tuple[int, ...]


def split_batch(batch: Any, num_parts: int, what: str = "input") -> Microbatches:
    """Cut every tensor of ``batch`` along dim 0 into ``num_parts`` views.

    Args:
        batch: tensors in any nesting, and whatever else, which every part gets.
        num_parts: of which none may be empty.
        what: the name of ``batch`` in errors.

    Raises:
        ArgumentError: there is no tensor, one is sparse or has no dim 0, their lengths differ, or
            there are fewer rows than parts.

    Example:
        >>> parts = split_batch({"x": torch.arange(10), "scale": 2.0}, 4)
        >>> parts.rows, parts.parts[3]
        ((3, 3, 2, 2), {'x': tensor([8, 9]), 'scale': 2.0})
    """
    if num_parts < 1:
        raise ArgumentError(f"microbatches must be > 0, not {num_parts}")
    leaves, spec = pytree.tree_flatten(batch)
    total = _rows_of(leaves, num_parts, what)
    bounds = [shard_range(total, num_parts, i) for i in range(num_parts)]
    rows = tuple(last - first for first, last in bounds)
    columns = [
        leaf.split(rows) if isinstance(leaf, Tensor) else (leaf,) * num_parts for leaf in leaves
    ]
    parts = [pytree.tree_unflatten(row, spec) for row in zip(*columns, strict=True)]
    return Microbatches(tuple(parts), rows)


def _rows_of(leaves: Sequence[Any], num_parts: int, what: str) -> int:
    """Length of dim 0, which all tensors share."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ArgumentError(f"{what} has no tensor, so there is nothing to cut into microbatches")
    for tensor in tensors:
        if tensor.layout != torch.strided or tensor.is_nested:
            kind = "nested" if tensor.is_nested else tensor.layout
            raise ArgumentError(
                f"{what} has a tensor that is {kind}, which cannot be cut into microbatches: give "
                "a dense one, and make it sparse or nested inside of the first stage"
            )
        if not tensor.dim():
            raise ArgumentError(
                f"{what} tensor must have at least 1 dimension to be cut into microbatches; give "
                "a number as a Python number, which every microbatch gets"
            )
    lengths = sorted({tensor.shape[0] for tensor in tensors})
    if len(lengths) > 1:
        raise ArgumentError(
            f"tensors of {what} have dim 0 of lengths {lengths}: they must agree, since a "
            "microbatch takes the same rows of each"
        )
    if lengths[0] < num_parts:
        raise ArgumentError(
            f"{what} has {lengths[0]} rows for {num_parts} microbatches: give a larger batch or "
            "fewer microbatches"
        )
    return lengths[0]


def join_batches(parts: Sequence[Any]) -> Any:
    """What ``split_batch`` cut, whole again: tensors end to end along dim 0.

    Tensors without dims come back stacked, one number for each part; what is no tensor is that of
    the first part.

    Example:
        >>> join_batches([{"y": torch.tensor([1])}, {"y": torch.tensor([2, 3])}])
        {'y': tensor([1, 2, 3])}
    """
    flat = [pytree.tree_flatten(part) for part in parts]
    spec = flat[0][1]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten([_joined(column) for column in columns], spec)


def _joined(column: Sequence[Any]) -> Any:
    if not isinstance(column[0], Tensor):
        return column[0]
    return torch.cat(tuple(column)) if column[0].dim() else torch.stack(tuple(column))
