"""Modules of a program that each simulated rank imports for itself, as a process does.

A program keeps in its modules what is of one rank: its number, its groups, a model that was built
when the module was imported. So while ranks take turns, each has its own ``__main__`` and its own
modules of the program's folders. What is installed, such as torch, is imported once for all.

::

    sys.modules     turn of rank 0         turn of rank 1
    torch           torch                  torch
    __main__        main of rank 0         main of rank 1
    mesh_setup      module of rank 0       not imported yet

[Note: locks of imports]
A rank may wait for others while it imports a module, as where the module makes a group. Python
locks imports by the names of modules, so the next rank that imports its own module of that name
would wait for the first one, and that for the next one. So the locks of such modules are exchanged
with the modules.
"""

from __future__ import annotations

import builtins
import importlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final

from echelon.comm.threads.process_messages import messages_of_ranks
from echelon.comm.threads.process_state import register_state
from echelon.comm.threads.rank_threads import this_rank

VARIABLE = "ECHELON_OWN_MODULES"
_INSTALLED = {"site-packages", "dist-packages"}
_MAIN = "__main__"
_MAINS = (_MAIN, "__mp_main__")  # what processes that are spawned call it


class _Program(NamedTuple):
    """What a rank has of the program.

    Attributes:
        modules: those that it has imported.
        locks: of those that it is importing now.
        arguments: ``sys.argv``.
        path: ``sys.path``.
    """

    modules: dict[str, ModuleType]
    locks: dict[str, Any]
    arguments: list[str]
    path: list[str]


def _import_locks() -> dict[str, Any]:
    locks: dict[str, Any] = vars(importlib)["_bootstrap"]._module_locks
    return locks


@final
class ProgramModules(MetaPathFinder):
    """Notes which of the modules that ranks import are those of the program.

    Args:
        folders: where the program's modules are, in folders below, too.
        choices: names of packages that are the program's wherever they lie, and after a ``-`` names
            of those that ranks share.
    """

    def __init__(self, folders: Iterable[str], choices: str = "") -> None:
        self._folders = [Path(folder).resolve() for folder in folders]
        words = [word.strip() for word in choices.split(",")]
        self._own = {word for word in words if word and not word.startswith("-")}
        self._shared = {word[1:] for word in words if word.startswith("-")}
        self._shared |= {"torch", "echelon"}
        kinds = ("stdlib", "platstdlib", "purelib", "platlib")
        self._installed = [Path(sysconfig.get_path(kind)).resolve() for kind in kinds]
        places = [Path(entry).resolve() for entry in sys.path]
        self._installed += [place for place in places if any(place.glob("*.dist-info"))]
        self._names = set(_MAINS)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders say, after a look at it."""
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if self._is_of_program(spec):
                    self._names.add(name)
                return spec
        return None

    def _is_of_program(self, spec: ModuleSpec) -> bool:
        package = spec.name.partition(".")[0]
        if package in self._shared or spec.name in self._shared:
            return False
        if spec.submodule_search_locations is not None and spec.origin is None:
            places = [Path(place) for place in spec.submodule_search_locations]
        elif isinstance(spec.loader, SourceFileLoader) and spec.origin is not None:
            places = [Path(spec.origin)]
        else:
            return False
        return package in self._own or all(self._is_in_folders(place) for place in places)

    def _is_in_folders(self, place: Path) -> bool:
        place = place.resolve()
        if _INSTALLED & set(place.parts):
            return False
        if any(place.is_relative_to(folder) for folder in self._installed):
            return False
        return any(place.is_relative_to(folder) for folder in self._folders)

    def save(self) -> _Program:
        """What the process has now of the program."""
        modules, locks = sys.modules, _import_locks()
        return _Program(
            {name: modules[name] for name in self._names if name in modules},
            {name: locks[name] for name in self._names if name in locks},
            sys.argv,
            sys.path,
        )

    def restore(self, saved: _Program) -> None:
        """Let an import find these modules; see [Note: locks of imports]."""
        sys.argv, sys.path = saved.arguments, saved.path
        values: dict[str, Any]
        for places, values in ((sys.modules, saved.modules), (_import_locks(), saved.locks)):
            for name in self._names:
                if name in values:
                    places[name] = values[name]
                else:
                    places.pop(name, None)


def _at_first(saved: _Program) -> _Program:
    """What a rank begins with: of a rank that has started it, all modules; else none."""
    names = saved.modules if this_rank() is not None else {_MAIN}
    modules = {name: saved.modules[name] for name in names}
    return _Program(modules, {}, list(saved.arguments), list(saved.path))


def main_names(names: Mapping[str, Any]) -> dict[str, Any]:
    """The names of ``__main__`` of a program, which is the calling rank's from now on.

    Args:
        names: what is in them at first.
    """
    main = ModuleType(_MAIN)
    vars(main).update({"__builtins__": builtins, **names})
    sys.modules.update(dict.fromkeys(_MAINS, main))
    return vars(main)


@contextmanager
def importing_for_themselves(folder: str) -> Iterator[None]:
    """Let each of the simulated ranks that are started in the body import a program's modules.

    Args:
        folder: of the program; the working directory is one of its folders, too.
    """
    modules = ProgramModules((folder, os.getcwd()), os.environ.get(VARIABLE, ""))
    sys.meta_path.insert(0, modules)
    remove = register_state("program", modules.save, modules.restore, _at_first)
    try:
        with messages_of_ranks(lambda: modules.save().modules):
            yield
    finally:
        remove()
        sys.meta_path.remove(modules)
