"""How files are named, what is public, and that tests can be imported."""

import __future__

import ast
import importlib
import typing
from pathlib import Path
from types import ModuleType

import pytest

import echelon
from tests.architecture.sources import PACKAGE, ROOT, project_files

NAMELESS = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


def nameless(path: Path) -> list[str]:
    """A file or folder whose name does not say what is in it."""
    return [
        f"{path} is named {part!r}, which does not say what is in it"
        for part in path.with_suffix("").parts
        if NAMELESS & set(part.split("_"))
    ]


def unlisted_names(package: ModuleType) -> list[str]:
    """Differences between ``__all__`` and the names that a user can import."""
    if not hasattr(package, "__all__"):
        return [f"{package.__name__} has no __all__"]
    listed = list(package.__all__)
    missing = [name for name in listed if not hasattr(package, name)]
    public = {
        name
        for name in set(dir(package)) - set(missing)
        if not name.startswith("_")
        # Not meant as names of the package: what it needs itself, and modules, of which each
        # one becomes an attribute when anybody imports it.
        and not hasattr(typing, name)
        and not isinstance(getattr(package, name), ModuleType | __future__._Feature)
    }
    return (
        [f"{name} is in __all__ and cannot be imported" for name in missing]
        + [f"{name} is public and not in __all__" for name in sorted(public - set(listed))]
        + [f"{name} is twice in __all__" for name in sorted(set(listed)) if listed.count(name) > 1]
    )


# --- the project obeys them --------------------------------------------------------------------


def test_file_names_say_what_is_in_them() -> None:
    assert [s for path in project_files() for s in nameless(path.relative_to(ROOT))] == []


def test_all_is_what_a_user_can_import() -> None:
    assert unlisted_names(importlib.import_module(PACKAGE)) == []


def test_type_checkers_see_each_public_name_in_the_module_that_it_is_imported_from() -> None:
    (block,) = [
        node
        for node in ast.parse(Path(str(echelon.__file__)).read_text()).body
        if isinstance(node, ast.If)
    ]
    seen = [
        (alias.asname, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom) and node.module != "types"
        for alias in node.names
        if alias.name == alias.asname  # else it is not for users
    ]
    assert sorted(seen) == sorted(echelon._HOMES.items())


def test_every_folder_of_tests_is_a_package_so_that_child_processes_can_import_it() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


# --- the rules see what they should ------------------------------------------------------------


@pytest.mark.parametrize("path", ["src/utils.py", "tests/common/test_a.py", "src/io_helpers.py"])
def test_a_name_that_says_nothing_is_named(path: str) -> None:
    assert len(nameless(Path(path))) == 1


def test_a_public_name_outside_all_is_named() -> None:
    package = ModuleType("package")
    package.__all__ = ["gone"]
    package.stray = 1
    assert unlisted_names(package) == [
        "gone is in __all__ and cannot be imported",
        "stray is public and not in __all__",
    ]
