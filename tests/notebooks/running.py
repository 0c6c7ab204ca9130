"""Runs the cells of a notebook as plain Python, with some of them replaced."""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    """A notebook."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def exercises(name: str) -> dict[str, str]:
    """The texts of the cells with exercises, by tag."""
    tags = ((cell, cell.metadata.get("tags", [])) for cell in read(name).cells)
    return {tag[1]: cell.source for cell, tag in tags if tag[:1] == ["exercise"]}


@contextlib.contextmanager
def grader_at_hand() -> Iterator[None]:
    """The folder of the notebooks among those from which modules are imported."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield
    finally:
        sys.path.remove(str(FOLDER))
        sys.modules.pop("grader", None)


def run_cells(name: str, up_to: str, namespace: dict[str, Any]) -> None:
    """Run the cells before an exercise that only define something, in ``namespace``.

    What cells show is not computed: expressions at the end of a cell, and calls on ranks.
    """
    for cell in read(name).cells:
        if cell.metadata.get("tags", []) == ["exercise", up_to]:
            return
        if cell.cell_type == "code":
            run_source(cell.source, namespace, definitions_only=True)


def run_source(source: str, namespace: dict[str, Any], *, definitions_only: bool = False) -> None:
    """Run the text of a cell."""
    tree = ast.parse(source)
    if definitions_only:
        tree.body = [statement for statement in tree.body if _defines(statement)]
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(tree, "<cell>", "exec"), namespace)


def _defines(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef):
        return True
    text = ast.unparse(statement)
    if isinstance(statement, ast.Assign):
        return not re.search(r"ec\.|grade(_races)?\(|compare\(", text)
    return "set_default_dtype" in text


def grade_of(name: str, exercise: str, namespace: Mapping[str, Any]) -> Any:
    """The grade that the cell after an exercise shows."""
    scope = dict(namespace)
    for cell in read(name).cells:
        if cell.metadata.get("tags", []) == ["grade", exercise]:
            run_source(cell.source, scope)
    return scope[f"grade_{exercise}"]
