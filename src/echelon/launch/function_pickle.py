"""How a function goes from ``run`` to the processes that it starts, and how its result comes back.

The only pickles of this library, and the only place that reads one. They go through pipes that a
child inherits from its parent, so that no other process can write what is read here.

What is defined in a notebook, in ``python -c``, on standard input or at a prompt cannot be
imported by a child; nor can a closure, a lambda, or what a script makes under
``if __name__ == "__main__":``. cloudpickle sends their code.
"""

from __future__ import annotations

import ast
import dis
import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from echelon.comm.streams import device_of
from echelon.errors import ArgumentError

loads = pickle.loads
_ADVICE = "return numbers, tensors or containers of them, or use world='threads'"


def dumps(value: object) -> bytes:
    """The bytes of ``value``, with the code of what cannot be imported by its name.

    Raises:
        Exception: it cannot be sent; ``TypeError`` or ``pickle.PicklingError`` as a rule.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer).dump(value)
    except Exception as error:
        try:
            return _bytes_with_code(value)
        except ImportError:
            raise pickle.PicklingError(f"{error}; with cloudpickle installed it may") from error
    return buffer.getvalue()


def dumps_result(result: object, rank: int) -> bytes:
    """The bytes of what ``rank`` returned.

    Raises:
        ArgumentError: it cannot be sent.
    """
    try:
        return dumps(result)
    except Exception as error:  # whatever the object at fault raises
        kind = f"{type(result).__module__}.{type(result).__qualname__}".removeprefix("builtins.")
        raise ArgumentError(
            f"rank {rank} returned a {kind} that cannot be sent to the process that called run "
            f"({type(error).__name__}: {error}): {_ADVICE}"
        ) from error


def loads_result(payload: bytes) -> Any:
    """What a rank returned.

    Raises:
        ArgumentError: only the rank can build it.
    """
    try:
        return loads(payload)
    except Exception as error:  # whatever the object at fault raises
        raise ArgumentError(
            f"what a rank returned cannot be rebuilt in the process that called run "
            f"({type(error).__name__}: {error}): {_ADVICE}"
        ) from error


def dumps_job(job: object) -> bytes:
    """The bytes of what a child is to do, which may be defined in the main module.

    Raises:
        Exception: as ``dumps``.
    """
    if _can_import_main():
        return dumps(job)
    return _bytes_with_code(job)


def _bytes_with_code(value: object) -> bytes:
    """The bytes of ``value`` as cloudpickle makes them; ``ImportError`` where it is missing."""
    import cloudpickle

    class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]  # it has no types
        def reducer_override(self, obj: Any) -> Any:
            reduced = _reduced(obj)
            return super().reducer_override(obj) if reduced is NotImplemented else reduced

    buffer = io.BytesIO()
    CodePickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and (name := _missing_in_child(obj)) is not None:
            raise pickle.PicklingError(
                f'{name!r} is made under `if __name__ == "__main__":`, which other processes do '
                "not run: make it above that line"
            )
        return _reduced(obj)


def _missing_in_child(value: type | FunctionType) -> str | None:
    """What ``value`` is or uses of the main module that a child that imports it does not have."""
    main = vars(sys.modules["__main__"])
    if value.__module__ not in _MAIN or not (guarded := _guarded_names(main.get("__file__"))):
        return None
    waiting, seen = [value.__qualname__.partition(".")[0]], set[str]()
    while waiting:
        name = waiting.pop()
        if name in guarded:
            return name
        used = main.get(name)
        if name not in seen and isinstance(used, FunctionType) and used.__module__ in _MAIN:
            waiting += _globals_in(used.__code__)
        seen.add(name)
    return None


_MAIN = ("__main__", "__mp_main__")  # where multiprocessing imports the script


def _globals_in(code: CodeType) -> Iterator[str]:
    """The globals that a function looks up, and those that functions inside of it do."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _globals_in(instruction.argval)


@cache
def _guarded_names(file: str | None) -> frozenset[str]:
    """The functions and classes of a script that are made where it asks for its ``__name__``."""
    try:
        statements = ast.parse(Path(str(file)).read_bytes()).body
    except (OSError, SyntaxError, ValueError):  # no text of Python, as in an archive
        return frozenset()
    waiting: list[ast.AST] = [
        statement
        for statement in statements
        if isinstance(statement, ast.If)
        and any(isinstance(n, ast.Name) and n.id == "__name__" for n in ast.walk(statement.test))
    ]
    names = set[str]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        else:
            waiting += ast.iter_child_nodes(node)
    return frozenset(names)


def _reduced(value: object) -> Any:
    """How to rebuild an untyped storage, for which torch has no way; other values are not ours."""
    if type(value) is not torch.UntypedStorage or not device_of(value.device).is_host:
        return NotImplemented
    content = torch.empty(0, dtype=torch.uint8, device="cpu").set_(value)
    return _storage_of, (content.numpy().tobytes(),)


def _storage_of(data: bytes) -> torch.UntypedStorage:
    return torch.tensor(memoryview(data), dtype=torch.uint8, device="cpu").untyped_storage()


@contextmanager
def importing_main_if_it_can() -> Iterator[None]:
    """Let processes that multiprocessing starts meanwhile import the script only if it is one.

    Where a program comes from standard input, they would look for a script named ``<stdin>``.
    """
    names = vars(sys.modules["__main__"])
    hidden = {"__file__", "__spec__"} & names.keys() if not _can_import_main() else set()
    before = {name: names.pop(name) for name in hidden}
    names.setdefault("__spec__", None)  # multiprocessing asks for this one
    try:
        yield
    finally:
        names.update(before)


def _can_import_main() -> bool:
    """Whether a child finds in the main module what this process has in it.

    multiprocessing imports the script there, if there is one. What was typed is in no script.
    """
    main = sys.modules["__main__"]
    if sys.flags.interactive or hasattr(sys, "ps1"):
        return False
    if getattr(main, "__spec__", None) is not None:
        return True
    file: Any = getattr(main, "__file__", None)
    return file is not None and Path(file).exists()
