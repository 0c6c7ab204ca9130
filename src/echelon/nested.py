"""The tensors inside of what a module takes or returns, however it is nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["cast_floats", "tensors"]


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts, dataclasses and registered pytrees."""
    if isinstance(value, Tensor):
        yield value
        return
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for item in fields(leaf):
                yield from tensors(getattr(leaf, item.name))


def cast_floats(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with ``cast`` of every floating-point tensor in it."""

    def one(leaf: Any) -> Any:
        return cast(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(one, value)
