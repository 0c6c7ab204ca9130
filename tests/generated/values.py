"""What goes between modules of a generated model: tensors in every kind of wrapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VISIBLE = ("tensor", "tuple", "list", "dict", "dataclass")  # wrapping in which tensors are found


@dataclass
class Box:
    """A dataclass with a tensor and other things."""

    x: Tensor
    label: str = "box"


class Bag:
    """An object in which nobody looks for tensors."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Context:
    """What all modules of one model see beside their arguments.

    Attributes:
        step: of the program.
        rank: whose batch it is.
        tokens: indices for embeddings, one a row.
        stash: activations that one module leaves for another.
        handed: an input that is given as an attribute.
    """

    def __init__(self) -> None:
        self.step = self.rank = 0
        self.tokens = torch.zeros(1, dtype=torch.int64)
        self.stash: dict[int, Tensor] = {}
        self.handed: Tensor | None = None


def pack(x: Tensor, kind: str) -> Any:
    """A tensor in the wrapping of that name."""
    if kind == "tuple":
        return (x, None)
    if kind == "list":
        return [x, x.detach()]
    if kind == "dict":
        return {"x": x, "number": 3}
    if kind == "dataclass":
        return Box(x)
    return Bag(x) if kind == "object" else x


def unpack(value: Any) -> Tensor:
    """The tensor in any wrapping."""
    if isinstance(value, Box | Bag):
        return value.x
    if isinstance(value, dict):
        return value["x"]
    return value[0] if isinstance(value, tuple | list) else value


def factor(extra: Tensor) -> Tensor:
    """What a further tensor of a batch multiplies by: rows each by their own, or all alike.

    Args:
        extra: (rows, n, 1) with a row for each of the batch, or (n, n).
    """
    return 1 + (extra.mean(1) if extra.dim() == 3 else extra.mean())


def call(module: nn.Module, x: Tensor) -> Tensor:
    """Call a module with its input given, and its output taken, as it wants them."""
    takes = getattr(module, "takes", "tensor")
    if takes == "keyword":
        return unpack(module(value=x))
    if takes == "attribute":
        module.context.handed = x
        return unpack(module(None))
    if takes == "closure":
        return unpack(module(lambda: x))
    return unpack(module(pack(x, takes)))


def received(module: nn.Module, value: Any) -> Tensor:
    """The input of a module, in whatever way it came."""
    if value is None:
        value, module.context.handed = module.context.handed, None
    elif callable(value) and not isinstance(value, Tensor):
        value = value()
    return unpack(value)
