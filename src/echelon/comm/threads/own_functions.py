"""Functions of ``torch.nn`` that each simulated rank may replace for itself.

Libraries replace functions of ``torch.nn.init`` while they build or load a model, and restore them
afterwards. Ranks that are threads would save the replacements of each other, and restore those.
Here an assignment to such a function is visible only to the rank that makes it.

Law: the function that a simulated rank calls depends only on its own assignments, and on those that
were made before the ranks started.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

from echelon.comm.threads.installation import Installation

# Modules that import functions of torch.nn.init by name, or define some, are among them.
_LAYERS = "activation adaptive batchnorm conv linear loss normalization rnn sparse transformer"
_MODULES = ("torch.nn.init", *(f"torch.nn.modules.{name}" for name in _LAYERS.split(" ")))

_current = threading.local()


class _SharedModule(ModuleType):
    """A module in which each simulated rank sees the functions that it has assigned itself."""

    def __getattribute__(self, name: str) -> Any:
        member = super().__getattribute__(name)
        if type(member) is FunctionType and (original := _originals.get(member)) is not None:
            assigned: dict[Any, Any] = getattr(_current, "assigned", None) or {}
            return assigned.get(member, original)
        return member

    def __setattr__(self, name: str, value: Any) -> None:
        assigned: dict[Any, Any] | None = getattr(_current, "assigned", None)
        member = vars(self).get(name)
        if assigned is None or type(member) is not FunctionType:
            super().__setattr__(name, value)
            return
        with _lock:
            member = vars(self)[name]
            if member not in _originals:
                member = vars(self)[name] = _dispatching(member)
        if value is _originals[member] or value is member:
            assigned.pop(member, None)
        else:
            assigned[member] = value


_originals: dict[FunctionType, FunctionType] = {}  # by the dispatching function in its place
_lock = threading.Lock()


def _dispatching(original: FunctionType) -> FunctionType:
    """A function that calls the calling rank's replacement of ``original``."""

    @wraps(original)
    def dispatch(*args: Any, **kwargs: Any) -> Any:
        assigned: dict[Any, Callable[..., Any]] = getattr(_current, "assigned", None) or {}
        return assigned.get(dispatch, original)(*args, **kwargs)

    assert isinstance(dispatch, FunctionType)
    _originals[dispatch] = original
    return dispatch


def _install() -> None:
    for module in _modules():
        module.__class__ = _SharedModule


def _restore() -> None:
    """Restore the modules after the last rank has ended."""
    for module in _modules():
        module.__class__ = ModuleType
        for name, member in list(vars(module).items()):
            if type(member) is FunctionType and member in _originals:
                vars(module)[name] = _originals[member]
    _originals.clear()


def _modules() -> list[ModuleType]:
    return [sys.modules[name] for name in _MODULES if name in sys.modules]


_in_torch = Installation(_install, _restore, _lock)


@contextmanager
def own_functions() -> Iterator[None]:
    """Keep assignments to functions of ``torch.nn`` in the body to this thread.

    Example:
        >>> import torch
        >>> with own_functions():
        ...     torch.nn.init.zeros_ = torch.nn.init.ones_
        ...     torch.nn.init.zeros_(torch.empty(2))
        tensor([1., 1.])
        >>> torch.nn.init.zeros_(torch.empty(2))
        tensor([0., 0.])
    """
    with _in_torch.of_rank():
        _current.assigned = {}
        try:
            yield
        finally:
            _current.assigned = None
