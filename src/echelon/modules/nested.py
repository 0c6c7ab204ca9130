"""The tensors inside of what a module takes or returns, however it is nested."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.Generator,
    type,
    types.ModuleType,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    nn.Module,
)
_DEEPEST = 4  # objects inside of objects: a cache of keys and values holds layers that hold tensors


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in tuples, lists, dicts, dataclasses, registered pytrees and other objects.

    Of an object that is no registered pytree, the attributes are searched, four levels deep.
    Modules are not searched: their parameters are not arguments.
    """
    if isinstance(value, Tensor):  # what nearly all modules take and return
        yield value
    else:
        yield from _search(value, 0, set())


def _search(value: Any, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, _PLAIN):
        return
    elif type(value) in (tuple, list, dict):  # the general way takes ten times as long
        for item in value.values() if type(value) is dict else value:
            yield from _search(item, depth, seen)
    elif not pytree.tree_is_leaf(value):
        for leaf in pytree.tree_leaves(value):
            yield from _search(leaf, depth, seen)
    elif depth < _DEEPEST and id(value) not in seen:
        seen.add(id(value))
        for item in _attributes(value):
            yield from _search(item, depth + 1, seen)


def _attributes(value: Any) -> Iterator[Any]:
    if hasattr(value, "__dict__"):
        yield from vars(value).values()
    slots = (name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ()))
    yield from (
        getattr(value, name, None) for name in slots if name not in ("__weakref__", "__dict__")
    )


def cast_floats(value: Any, cast: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with ``cast`` of every floating-point tensor in it."""

    def cast_leaf(leaf: Any) -> Any:
        return cast(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast_leaf, value)
