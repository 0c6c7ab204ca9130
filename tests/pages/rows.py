"""The rows of tables that say what a name of another library is called here."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.pages.code_blocks import ROOT

FOLDER = ROOT / "docs" / "coming-from"


def names_in_rows(page: Path) -> set[str]:
    """What stands in backticks in the first column of the tables of ``page``."""
    names: set[str] = set()
    for line in page.read_text().splitlines():
        if line.startswith("| "):
            names |= set(re.findall(r"`([^`]+)`", line.split(" | ")[0]))
    return names


def parameters_of(callable_: Callable[..., Any]) -> set[str]:
    """The names of the parameters of a function, or of the constructor of a class."""
    return set(inspect.signature(callable_).parameters) - {"self"}


def public_methods(cls: type) -> set[str]:
    """The public names that a class defines itself."""
    return {name for name in vars(cls) if not name.startswith("_")}
