"""Messages between a simulated rank and processes that it has started.

``multiprocessing`` writes and reads them in threads of its own, which run at any time. Functions
and classes are in a message by the names of their modules, and the process may have the modules of
another rank then (``rank_modules``). So a thread that a rank starts keeps that rank's modules for
its messages.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from multiprocessing.reduction import ForkingPickler
from types import FunctionType, ModuleType
from typing import Any, final

from echelon.comm.threads.kept_by_threads import keep, kept
from echelon.process.replacement import Installation, Replacement

Modules = Mapping[str, ModuleType]


def _modules_of_thread() -> Modules:
    return kept("modules") or {}


def _member(module: ModuleType, name: str) -> Any:
    return reduce(getattr, name.split("."), module)


def _by_name(module: str, name: str) -> Any:
    """What the receiver of a message has by this name."""
    return _member(_modules_of_thread().get(module) or importlib.import_module(module), name)


def _reduce(_: object, value: Any) -> Any:
    """Write a function or a class of this thread's rank by its name."""
    if isinstance(value, FunctionType | type):
        module = _modules_of_thread().get(value.__module__)
        try:
            if module is not None and _member(module, value.__qualname__) is value:
                return _by_name, (value.__module__, value.__qualname__)
        except AttributeError:  # as of a local function, which pickle refuses with its own words
            pass
    return NotImplemented


@final
class _MessageReader(pickle.Unpickler):
    """Reads a message with the modules of this thread's rank."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """What the rank has by this name."""
        module = _modules_of_thread().get(module_name)
        if module is None:
            return super().find_class(module_name, global_name)
        return _member(module, global_name)


_load = ForkingPickler.loads


def _loads(data: Any, /, **options: Any) -> Any:
    if not _modules_of_thread():
        return _load(data, **options)
    return _MessageReader(io.BytesIO(data), **options).load()


_by_modules = Installation.of(
    Replacement(ForkingPickler, "reducer_override", _reduce),
    Replacement(ForkingPickler, "loads", staticmethod(_loads)),
)


@contextmanager
def messages_of_ranks(modules: Callable[[], Modules]) -> Iterator[None]:
    """In the body, threads that a rank starts have its modules in their messages.

    Args:
        modules: those that the process has of the rank which runs now.
    """
    forget = keep("modules", modules)
    try:
        with _by_modules.needed():
            yield
    finally:
        forget()
