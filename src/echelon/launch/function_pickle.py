"""How a function goes from ``run`` to the processes that it starts, and how its result comes back.

The only pickles of this library, and the only place that reads one. They go through pipes that a
child inherits from its parent, so that no other process can write what is read here.

What is defined in a notebook, in ``python -c``, on standard input or at a prompt cannot be
imported by a child; nor can a closure or a lambda. cloudpickle sends their code.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
        return _reduced(obj)


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
