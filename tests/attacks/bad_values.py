"""What users pass by mistake for an argument, made from its type."""

from __future__ import annotations

import inspect
import math
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch

# None of them is right where its type is not asked for.
POOL: tuple[Any, ...] = (
    *(None, True, 3, 1.5, math.nan, 2j, "no such choice", b"bytes", object(), len, int),
    *([], [object()], {}, {"a": 1}, (), torch.zeros(2, 2), torch.int32, torch.nn.ReLU()),
)


def fits(value: Any, hint: Any) -> bool:
    """Whether ``value`` is of the type ``hint``; nothing is said about its size."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (Any, object) or isinstance(hint, str):
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return type(value) in (int, float) and not math.isnan(value)
    if hint is int:
        return type(value) is int
    if origin is Callable or origin is type(Callable) or "Callable" in str(origin):
        return callable(value)
    if origin is tuple and inner and inner[-1] is not ...:
        return isinstance(value, tuple) and len(value) == len(inner)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if origin is not None and issubclass(origin, Sequence):
        kind = inner[0] if inner else Any
        if isinstance(value, Mapping) and not value:
            return True  # as good as an empty list
        return isinstance(value, list | tuple) and all(fits(one, kind) for one in value)
    if origin is not None:
        return isinstance(value, origin)
    return isinstance(value, os.PathLike | str) if hint is os.PathLike else isinstance(value, hint)


def bad_values(call: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Each argument of ``call`` with each value that its type forbids."""
    target = call.__init__ if inspect.isclass(call) else call
    hints = get_type_hints(target)
    for name, parameter in inspect.signature(call).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        for value in POOL:
            if not fits(value, hints[name]):
                yield name, value
