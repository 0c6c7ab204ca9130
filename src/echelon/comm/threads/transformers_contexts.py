"""Context managers of ``transformers`` that change classes or torch, for one simulated rank only.

``from_pretrained`` builds a model under ``no_tie_weights``, which replaces a method of the class
``PreTrainedModel``, and under ``meta_device_safe_creation_ops``, which replaces ``torch.linspace``;
``no_init_weights`` replaces another method. Another simulated rank that builds a model meanwhile
would silently get untied or uninitialised weights. So while simulated ranks run, these three
context managers of ``transformers.initialization`` act on the calling rank only.

The names are those of version 5.23. A version without them is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from echelon.comm.threads.installation import Installation
from echelon.process.replacement import Replacement

_MODULE = "transformers.initialization"
_current = threading.local()
_lock = threading.RLock()


class _LinspaceOnHost(TorchFunctionMode):
    """Lets ``torch.linspace`` make numbers on the CPU while the default device is meta."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.linspace:
            kwargs.setdefault("device", "cpu")
        return func(*args, **kwargs)


def _off(name: str) -> bool:
    """Whether this method of ``PreTrainedModel`` is switched off for the calling rank."""
    return getattr(_current, name, 0) > 0


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Switch off a method of ``PreTrainedModel`` for the calling rank."""
    model_class = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    with _lock:
        _replace(model_class, name, lambda method: _switchable(method, name))
    setattr(_current, name, getattr(_current, name, 0) + 1)
    try:
        yield
    finally:
        setattr(_current, name, getattr(_current, name) - 1)


def _switchable(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @wraps(method)
    def switched(*args: Any, **kwargs: Any) -> Any:
        return None if _off(name) else method(*args, **kwargs)

    return switched


@contextmanager
def _without_init(names: Mapping[str, Any]) -> Iterator[None]:
    """Do as ``no_init_weights``, which also keeps modules of torch from drawing weights."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    modules = [sys.modules[name] for name in names["TORCH_MODULES_TO_PATCH"] if name in sys.modules]
    functions = [
        (module, name, getattr(module, name))
        for module in modules
        for name in names["TORCH_INIT_FUNCTIONS"]
        if hasattr(module, name)
    ]
    with _without("init_weights"):
        try:
            for module, name, _ in functions:
                setattr(module, name, nothing)  # for this rank, see own_functions
            yield
        finally:
            for module, name, function in functions:
                setattr(module, name, function)


def _replace(holder: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace a function of the library, if that has not been done; needs the lock."""
    if (holder, name) not in _replacements:
        new = wrap(vars(holder)[name])
        _replacements[holder, name] = Replacement(holder, name, new)
        _replacements[holder, name].put_in()


def _contexts(names: Mapping[str, Any]) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """The replacements of the context managers of the library, by their names."""
    return {
        "no_tie_weights": lambda: _without("tie_weights"),
        "no_init_weights": lambda: _without_init(names),
        "meta_device_safe_creation_ops": _LinspaceOnHost,
    }


def _adapt(module: ModuleType) -> None:
    """Use the replacements on simulated ranks."""
    names = vars(module)
    for name, replacement in _contexts(names).items():
        if name in names:
            _replace(module, name, partial(_on_ranks, replacement=replacement))


def _on_ranks(
    library: Callable[[], AbstractContextManager[None]],
    replacement: Callable[[], AbstractContextManager[None]],
) -> Callable[[], AbstractContextManager[None]]:
    @wraps(library)
    def context() -> AbstractContextManager[None]:
        return replacement() if getattr(_current, "is_rank", False) else library()

    return context


class _Finder(importlib.abc.MetaPathFinder):
    """Adapts the library if it is first imported while simulated ranks run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec of the module, which is adapted after its import."""
        if name != _MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_adapt(module: ModuleType) -> None:
            execute(module)
            with _lock:
                if _in_library:
                    _adapt(module)

        spec.loader.exec_module = execute_and_adapt  # type: ignore[method-assign]
        return spec


_finder = _Finder()
_replacements: dict[tuple[Any, str], Replacement] = {}  # by what they replace


@contextmanager
def own_contexts() -> Iterator[None]:
    """Let the context managers act on this thread only, if it enters them in the body."""
    with _in_library.of_rank():
        _current.is_rank = True
        try:
            yield
        finally:
            _current.is_rank = False


def _install() -> None:
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if (module := sys.modules.get(_MODULE)) is not None and not _is_importing(module):
        _adapt(module)


def _is_importing(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _restore() -> None:
    """Restore the library after the last rank has ended."""
    sys.meta_path.remove(_finder)
    for each in _replacements.values():
        each.take_out()
    _replacements.clear()


_in_library = Installation(_install, _restore, _lock)
