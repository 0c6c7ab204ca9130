"""How long a file and a function may be, how files and variables are named, what is public."""

import __future__

import ast
import importlib
import typing
from collections.abc import Collection
from pathlib import Path
from types import ModuleType

import pytest

from tests.architecture.sources import (
    PACKAGE,
    ROOT,
    Modules,
    package_of,
    project_files,
    read_modules,
)

NAMELESS = {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
# A variable is named after what it holds.
VAGUE = {"found", "own", "one", "told", "mine", "theirs"}
# Modules that still have such variables: one a line. The list only becomes shorter.
VAGUE_NAMES = Path(__file__).parent / "vague_names.txt"
MAX_FUNCTION_LINES = 60


def too_long(path: str, source: str) -> list[str]:
    """Each function of the file that is longer than the limit."""
    sentences = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                sentences.append(
                    f"{path}:{node.lineno}: {node.name} has {num_lines} lines, "
                    f"more than {MAX_FUNCTION_LINES}: it does two things"
                )
    return sentences


def nameless(path: Path) -> list[str]:
    """A file or folder whose name does not say what is in it."""
    return [
        f"{path} is named {part!r}, which does not say what is in it"
        for part in path.with_suffix("").parts
        if NAMELESS & set(part.split("_"))
    ]


def vague_names(modules: Modules, known: Collection[str]) -> list[str]:
    """Parameters and variables whose name does not say what they hold, except in known modules."""
    return [
        f"{name}:{node.lineno}: {word!r} does not say what it holds"
        for name in sorted(modules.keys() - known)
        for node in ast.walk(modules[name])
        if isinstance(node, ast.arg | ast.Name)
        and not isinstance(getattr(node, "ctx", None), ast.Load)
        and (word := node.arg if isinstance(node, ast.arg) else node.id) in VAGUE
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


def test_functions_keep_to_their_length() -> None:
    assert [
        sentence
        for path in project_files()
        for sentence in too_long(str(path.relative_to(ROOT)), path.read_text())
    ] == []


def test_file_names_say_what_is_in_them() -> None:
    assert [s for path in project_files() for s in nameless(path.relative_to(ROOT))] == []


def test_variables_are_named_after_what_they_hold() -> None:
    known = VAGUE_NAMES.read_text().split()
    assert known == sorted(set(known)), "sorted, each once"
    assert vague_names(read_modules(), known) == []


def test_all_is_what_a_user_can_import() -> None:
    assert unlisted_names(importlib.import_module(PACKAGE)) == []


def test_every_folder_of_tests_is_a_package_so_that_child_processes_can_import_it() -> None:
    folders = {path.parent for path in (ROOT / "tests").rglob("*.py")}
    assert [str(f.relative_to(ROOT)) for f in folders if not (f / "__init__.py").exists()] == []


# --- the rules see what they should ------------------------------------------------------------


def test_a_long_function_is_named() -> None:
    source = "def f():\n" + "    x = 1\n" * 60
    assert too_long("a.py", source) == ["a.py:1: f has 61 lines, more than 60: it does two things"]


@pytest.mark.parametrize("path", ["src/utils.py", "tests/common/test_a.py", "src/io_helpers.py"])
def test_a_name_that_says_nothing_is_named(path: str) -> None:
    assert len(nameless(Path(path))) == 1


def test_a_vague_name_is_named_outside_of_the_known_modules() -> None:
    modules = package_of(a="found = 1\nlambda one: found\nseen.own = 2", b="mine = 1")
    assert vague_names(modules, {"b"}) == [
        "a:1: 'found' does not say what it holds",
        "a:2: 'one' does not say what it holds",
    ]


def test_a_public_name_outside_all_is_named() -> None:
    package = ModuleType("package")
    package.__all__ = ["gone"]
    package.stray = 1
    assert unlisted_names(package) == [
        "gone is in __all__ and cannot be imported",
        "stray is public and not in __all__",
    ]
