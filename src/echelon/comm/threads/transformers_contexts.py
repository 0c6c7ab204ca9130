"""The contexts of the ``transformers`` library that change a class or torch itself for everybody.

``from_pretrained`` builds a model under ``no_tie_weights``, which replaces a method of the class
``PreTrainedModel``, and under ``meta_device_safe_creation_ops``, which replaces ``torch.linspace``;
``no_init_weights`` replaces another method. A rank that builds a model meanwhile would have untied
or uninitialised weights, without a word. While simulated ranks run, these three contexts of
``transformers.initialization`` do the same for the calling rank only.

Version 5.23 was read. A version that has none of these names is left as it is.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from echelon.comm.threads.installation import Installation

_MODULE = "transformers.initialization"
_current = threading.local()
_lock = threading.RLock()


class _LinspaceOnHost(TorchFunctionMode):
    """``torch.linspace`` makes real numbers where the default device has none."""

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
    """Whether the calling rank has switched off this method of ``PreTrainedModel``."""
    return getattr(_current, name, 0) > 0


@contextmanager
def _without(name: str) -> Iterator[None]:
    """Switch off a method of ``PreTrainedModel`` for the calling rank."""
    model_class = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    with _lock:
        method = vars(model_class)[name]
        if (model_class, name) not in _methods:
            _methods[model_class, name] = method
            setattr(model_class, name, _switchable(method, name))
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
    """As ``no_init_weights``: modules of torch do not draw weights either."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        pass

    modules = [sys.modules[name] for name in names["TORCH_MODULES_TO_PATCH"] if name in sys.modules]
    found = [
        (module, name, getattr(module, name))
        for module in modules
        for name in names["TORCH_INIT_FUNCTIONS"]
        if hasattr(module, name)
    ]
    with _without("init_weights"):
        try:
            for module, name, _ in found:
                setattr(module, name, nothing)  # of this rank: see own_functions
            yield
        finally:
            for module, name, function in found:
                setattr(module, name, function)


def _contexts(names: Mapping[str, Any]) -> dict[str, Callable[[], AbstractContextManager[None]]]:
    """What stands for the contexts of the library on a simulated rank, by their names."""
    return {
        "no_tie_weights": lambda: _without("tie_weights"),
        "no_init_weights": lambda: _without_init(names),
        "meta_device_safe_creation_ops": _LinspaceOnHost,
    }


def _adapt(module: ModuleType) -> None:
    """Have the contexts of the library act on the calling rank only, if it is one."""
    names = vars(module)
    for name, own in _contexts(names).items():
        if name in names and name not in _library:
            _library[name] = names[name]
            names[name] = _on_ranks(names[name], own)


def _on_ranks(
    library: Callable[[], AbstractContextManager[None]],
    own: Callable[[], AbstractContextManager[None]],
) -> Callable[[], AbstractContextManager[None]]:
    @wraps(library)
    def context() -> AbstractContextManager[None]:
        return own() if getattr(_current, "is_rank", False) else library()

    return context


class _Finder(importlib.abc.MetaPathFinder):
    """Adapts the library when a rank is the first to import it."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The usual spec of the one module, which is adapted when it has run."""
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
_library: dict[str, Any] = {}  # what was replaced in its module, by name
_methods: dict[tuple[type, str], Any] = {}  # what was replaced in its classes


@contextmanager
def own_contexts() -> Iterator[None]:
    """Let those contexts act on this thread only, where it enters them while the body runs."""
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
    """Have the library as it was, once the last ranks have ended."""
    sys.meta_path.remove(_finder)
    if (module := sys.modules.get(_MODULE)) is not None:
        vars(module).update(_library)
    for (model_class, name), method in _methods.items():
        setattr(model_class, name, method)
    _library.clear()
    _methods.clear()


_in_library = Installation(_install, _restore, _lock)
