"""A range of one tensor of the plain model, in the memory of one rank; all state consists of them.

::

    plain model    | weight (3x4) ............ | bias (3) |        by name, flattened
    rank 0 holds   | weight[0:8]  |                                one range of one tensor
    rank 1 holds                  | weight[8:12] | bias[0:3] |

Every technique describes what it holds in these terms. Code that reads or writes a model knows no
technique, and arithmetic of ranges converts any layout into any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import final

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from echelon.comm.buffers import is_expanded
from echelon.errors import ArgumentError

Shape = tuple[int, ...]
Rename = Callable[[str], str]


class Replication(Enum):
    """How the copies of one range on several ranks relate."""

    IDENTICAL = "all copies have the same bits"
    PRIMARY = "the first copy counts; the others are overwritten with it when they next train"
    PER_RANK = "nothing keeps the copies equal, so each rank may have its own values"


@final
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TensorShard:
    """A range of one tensor of the plain model, in this rank's memory.

    Attributes:
        names: of the tensor in the plain model; the first is its name, the others are ties.
        shape: of the full tensor.
        start: first element of the range, in the flattened tensor.
        values: the memory of the range, of any shape; its row-major order is that of the range.
        copy: index of this rank among those that hold the same range.
        num_copies: number of ranks that hold it.
        replication: how the copies relate.
        tensor: the parameter or buffer itself, whose identity shows that modules share it.
    """

    names: tuple[str, ...]
    shape: Shape
    start: int
    values: Tensor
    copy: int = 0
    num_copies: int = 1
    replication: Replication = Replication.IDENTICAL
    tensor: Tensor | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The name of the tensor, without its ties."""
        return self.names[0]

    @property
    def numel(self) -> int:
        """Length of the range, in elements."""
        return self.values.numel()

    @property
    def is_whole(self) -> bool:
        """Whether the range is all of the tensor."""
        return self.numel == prod(self.shape)

    @property
    def identity(self) -> int:
        """A number that ranges of the same tensor of a module share, and no others."""
        return id(self if self.tensor is None else self.tensor)

    def range_of(self, tensor: Tensor) -> Tensor:
        """This range of a full tensor, in the shape of ``values``; a view if possible."""
        return range_like(self.values, tensor, self.start)

    def renamed(self, rename: Rename) -> TensorShard:
        """The same under other names."""
        return replace(self, names=tuple(map(rename, self.names)))


def range_like(values: Tensor, tensor: Tensor, start: int) -> Tensor:
    """The range of ``tensor`` from element ``start`` on, in the size and shape of ``values``."""
    return tensor.detach().reshape(-1)[start : start + values.numel()].view(values.shape)


def whole(
    names: tuple[str, ...], tensor: Tensor, copy: int, num_copies: int, replication: Replication
) -> TensorShard:
    """The range that is all of a tensor.

    Raises:
        ArgumentError: it has no values, or none that can be read and written as plain numbers.
    """
    problem = _problem(tensor)
    if problem is not None:
        raise ArgumentError(f"{names[0]!r} cannot be saved or loaded: it {problem}")
    return TensorShard(
        names=names,
        shape=tuple(tensor.shape),
        start=0,
        values=tensor.detach(),
        copy=copy,
        num_copies=num_copies,
        replication=replication,
        tensor=tensor,
    )


def whole_parameter(names: tuple[str, ...], param: Tensor) -> TensorShard:
    """All of a parameter, for the state of an optimizer; its memory is not checked."""
    shape = tuple(param.shape)
    return TensorShard(names=names, shape=shape, start=0, values=param.detach(), tensor=param)


def _problem(tensor: Tensor) -> str | None:
    """Why a tensor is not plain numbers in memory; None if it is."""
    if is_lazy(tensor):
        return "has no shape yet. Run one batch through the model first"
    if tensor.is_meta:
        return "is on the meta device, so it has no values. Give it memory first"
    if tensor.is_nested:
        return "is a nested tensor. Keep its values and its offsets as two tensors"
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return (
            f"is a {type(tensor).__name__}, and only the library of that knows where its numbers "
            "are. Save it with that, or make it a plain tensor"
        )
    if tensor.layout is not torch.strided or tensor.is_quantized:
        return (
            f"is {tensor.dtype} with layout {tensor.layout}. Make it a dense tensor of plain "
            "numbers with .to_dense() or .dequantize()"
        )
    if is_expanded(tensor):
        return (
            f"was expanded, so several of its {tensor.numel()} elements are one place in memory "
            "and could not be read back. Make it with .contiguous()"
        )
    return None
