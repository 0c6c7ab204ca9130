"""What each simulated rank gets of the values of fixtures, parameters and the test's instance.

Ranks that are processes have everything for themselves. Simulated ranks share one process, so a
model of a fixture would be one model on all ranks: its gradients would be added up, and an
``all_reduce`` of a tensor would be applied once for each rank. So values in which there are tensors
are copied for each rank; all others are the same object on all ranks.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, final

import torch

from echelon.errors import ArgumentError

_COPIED = (torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.Generator, random.Random)
_ATOMS = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
)
_MOST_OBJECTS = 10_000  # that are looked at in one value
# Objects of these packages lead to the whole session, or are the same for all by their nature.
_SHARED = {"pytest", "_pytest", "pluggy", "pytest_mock", "unittest", "threading", "logging"}


@final
class ValuesOfRank:
    """Makes the values of one rank; what two values have in common is also common to the copies."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}

    def of(self, name: str, value: Any) -> Any:
        """``value``, or a copy of it where there are tensors in it.

        Raises:
            ArgumentError: it holds tensors and cannot be copied.
        """
        if not _holds_tensors(value):
            return value
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:  # whatever an object in it raises
            raise ArgumentError(
                f"{name!r} holds tensors, of which each rank needs its own copy, and cannot be "
                f"copied ({error}): make it in the test, or let the fixture return a function "
                "that makes it"
            ) from None  # the sentence has what it says

    def instance(self, instance: Any) -> Any:
        """A shallow copy of the instance of a test class, with copies of what holds tensors."""
        twin = object.__new__(type(instance))
        inherited: dict[str, Any] = {}
        for base in reversed(type(instance).__mro__):
            if base.__module__.split(".")[0] not in {"builtins", *_SHARED}:
                inherited |= vars(base)
        state = {
            name: value
            for name, value in inherited.items()
            if not name.startswith("__") and _holds_tensors(value)
        } | vars(instance)
        for name, value in state.items():
            twin.__dict__[name] = self.of(f"self.{name}", value)
        return twin


def _holds_tensors(value: Any) -> bool:
    """Whether a tensor, a module or the like is in the value: in containers and attributes."""
    numpy = sys.modules.get("numpy")
    copied = (*_COPIED, numpy.ndarray, numpy.random.Generator) if numpy else _COPIED
    seen: set[int] = set()
    stack = [value]
    while stack and len(seen) < _MOST_OBJECTS:
        item = stack.pop()
        if isinstance(item, copied):
            return True
        if isinstance(item, _ATOMS) or id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Mapping) and type(item).__module__ != "os":
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item
        elif type(item).__module__.split(".")[0] not in _SHARED:
            stack += getattr(item, "__dict__", {}).values()
    return False
