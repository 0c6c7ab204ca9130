"""Functions of ``torch.nn`` that each simulated rank may replace for itself.

Libraries replace functions of ``torch.nn.init`` for as long as they build or load a model, and put
back what they found. Ranks that are threads would find what others have put there, and leave it
there for ever. Here a rank that assigns to such a function has replaced its own: it finds what it
has assigned itself, and the other ranks go on with theirs.

Law: what a simulated rank calls depends only on its own assignments, and on those that were made
before the ranks started.
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

# Those that import functions of torch.nn.init by name, or have some of their own, are in it, too.
_LAYERS = "activation adaptive batchnorm conv linear loss normalization rnn sparse transformer"
_MODULES = ("torch.nn.init", *(f"torch.nn.modules.{name}" for name in _LAYERS.split(" ")))

_current = threading.local()


class _SharedModule(ModuleType):
    """A module in which a simulated rank sees the functions that it has assigned itself."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if type(found) is FunctionType and (original := _originals.get(found)) is not None:
            assigned: dict[Any, Any] = getattr(_current, "assigned", None) or {}
            return assigned.get(found, original)
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        assigned: dict[Any, Any] | None = getattr(_current, "assigned", None)
        found = vars(self).get(name)
        if assigned is None or type(found) is not FunctionType:
            super().__setattr__(name, value)
            return
        with _lock:
            found = vars(self)[name]
            if found not in _originals:
                found = vars(self)[name] = _dispatching(found)
        if value is _originals[found] or value is found:
            assigned.pop(found, None)
        else:
            assigned[found] = value


_originals: dict[FunctionType, FunctionType] = {}  # by what dispatches in their place
_lock = threading.Lock()


def _dispatching(original: FunctionType) -> FunctionType:
    """Calls what the calling rank has in the place of ``original``."""

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
    """Have the modules as they were, once the last ranks have ended."""
    for module in _modules():
        module.__class__ = ModuleType
        for name, found in list(vars(module).items()):
            if type(found) is FunctionType and found in _originals:
                vars(module)[name] = _originals[found]
    _originals.clear()


def _modules() -> list[ModuleType]:
    return [sys.modules[name] for name in _MODULES if name in sys.modules]


_in_torch = Installation(_install, _restore, _lock)


@contextmanager
def own_functions() -> Iterator[None]:
    """Let what this thread assigns to functions of ``torch.nn`` be its own while the body runs.

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
