"""How a function goes from ``run`` to the processes that it starts, and how its result comes back.

The only pickles of this library, and the only place that reads one. They go through pipes that a
child inherits from its parent, so that no other process can write what is read here.

What is defined in a notebook, in ``python -c``, on standard input or at a prompt cannot be
imported by a child; nor can a closure or a lambda. cloudpickle sends their code.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

loads = pickle.loads


def dumps(value: object) -> bytes:
    """The bytes of ``value``, with the code of what cannot be imported by its name.

    Raises:
        Exception: it cannot be sent; ``TypeError`` or ``pickle.PicklingError`` as a rule.
    """
    try:
        return pickle.dumps(value)
    except Exception as error:
        try:
            import cloudpickle
        except ImportError:
            raise pickle.PicklingError(f"{error}; with cloudpickle installed it may") from error
        return bytes(cloudpickle.dumps(value))


def dumps_job(job: object) -> bytes:
    """The bytes of what a child is to do, which may be defined in the main module.

    Raises:
        Exception: as ``dumps``.
    """
    if _can_import_main():
        return dumps(job)
    import cloudpickle

    return bytes(cloudpickle.dumps(job))


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
