"""What ``echelon run`` is to run: a script, or a module by its name."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any

from echelon.errors import ArgumentError


@dataclass(frozen=True)
class Program:
    """A script, or a module.

    Attributes:
        name: the path of the script, or the module's name with dots.
        is_module: which of the two.
    """

    name: str
    is_module: bool = False

    def problem(self) -> str | None:
        """Why it cannot be run, if that is seen at once."""
        if self.is_module:
            if not all(part.isidentifier() for part in self.name.split(".")):
                return f"{self.name!r} is no name of a module: give one as in package.train"
            return None
        path = Path(self.name)
        if not path.exists():
            return f"File {self.name!r} does not exist."
        if path.is_dir():
            return f"{self.name!r} is a directory: give a file, or -m and the name of a module."
        return None if os.access(path, os.R_OK) else f"{self.name!r} cannot be read."

    def words(self) -> list[str]:
        """What stands for it on the command line of Python."""
        if self.is_module:
            return ["-m", self.name]
        # A name such as -x.py would be taken for an option.
        return [f".{os.sep}{self.name}" if self.name.startswith("-") else self.name]

    def folder(self) -> str:
        """Where Python looks for modules first."""
        return os.getcwd() if self.is_module else str(Path(self.name).resolve().parent)

    def read(self) -> tuple[CodeType, Mapping[str, Any]]:
        """Its code, and the names that Python gives its module; ``__file__`` is among them.

        Raises:
            ArgumentError: there is no such module.
            SyntaxError: it is no Python.
        """
        if not self.is_module:
            path = Path(self.name)
            return compile(path.read_bytes(), self.name, "exec"), {"__file__": self.name}
        spec = _spec_of(self.name)
        code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        names = {
            "__file__": spec.origin,
            "__spec__": spec,
            "__package__": spec.parent,
            "__loader__": spec.loader,
        }
        return code, names


def _spec_of(name: str) -> ModuleSpec:
    """The specification of a module, or of ``__main__`` in a package."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except ModuleNotFoundError:  # of a package that it would be in
        spec = None
    if spec is None or not hasattr(spec.loader, "get_code"):
        raise ArgumentError(
            f"there is no module {name!r} to run; Python looks for it in {sys.path[0]} and where "
            "packages are installed"
        )
    return spec
