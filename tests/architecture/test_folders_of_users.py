"""What lies in a folder of a user is renamed and removed in few files, each with its reason.

Elsewhere ``process.atomic_files`` does it: at one instant, through no link, and nothing that we
have not written. Modules are read, not imported, as in ``tests.architecture``.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.sources import Modules, package_of, read_modules

# By module, why it may: what it renames or removes has names that only it gives.
MAY_REMOVE = {
    "process.atomic_files": "does it for all others",
    "process.plain_file": "the file of an earlier run that the user has named for a new one",
    "checkpoint.files": "steps of a run, and what saves have left, under the lock of the run",
    "launch.rank_output": "folders that it has made among the temporary files",
    "process.fork_server": "the socket of a server, in a folder of its own",
}
_OF_OS = {"replace", "rename", "renames", "unlink", "remove", "rmdir", "removedirs"}
_OF_SHUTIL = {"rmtree", "move"}
_OF_PATHS = {"unlink", "rename", "rmdir"}  # ``replace`` with one argument is that of a path


def removals(modules: Modules) -> list[str]:
    """Calls that rename or remove files, outside of the modules that may."""
    sentences = []
    for name in sorted(modules):
        lines = {call: line for line, call in calls_in(modules[name])}
        if lines and name not in MAY_REMOVE:
            sentences += [
                f"{name or 'echelon'}, line {line}, calls {call}: let process.atomic_files do it"
                for call, line in sorted(lines.items())
            ]
        if not lines and name in MAY_REMOVE:
            sentences.append(f"{name} removes nothing any more; take it from the list")
    return sentences


def calls_in(module: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the name of each call that renames or removes."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "shutil"):
            for alias in node.names:
                if alias.name in _OF_OS | _OF_SHUTIL:
                    yield node.lineno, alias.name
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, called = ast.unparse(node.func.value), node.func.attr
        if owner == "os":
            is_removal = called in _OF_OS
        elif owner == "shutil":
            is_removal = called in _OF_SHUTIL
        else:
            is_move = called == "replace" and len(node.args) == 1 and not node.keywords
            is_removal = called in _OF_PATHS or is_move
        if is_removal:
            yield node.lineno, f"{owner}.{called}"


def test_folders_of_users_are_changed_in_few_places() -> None:
    assert removals(read_modules()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.replace(a, b)",
        "import shutil\nshutil.rmtree(a)",
        "from shutil import rmtree",
        "path.unlink(missing_ok=True)",
        "part.replace(path)",
        "Path(a).rename(b)",
    ],
)
def test_every_way_to_remove_a_file_is_seen(source: str) -> None:
    (sentence,) = [
        each for each in removals(package_of(ddp__api=source)) if each.startswith("ddp.api")
    ]
    assert "let process.atomic_files do it" in sentence


def test_texts_and_records_are_no_files() -> None:
    source = 'text.replace("a", "b")\nreplace(options, keep=1)\nitems.remove(x)\nnodes.pop()'
    assert not [e for e in removals(package_of(ddp__api=source)) if e.startswith("ddp.api")]
