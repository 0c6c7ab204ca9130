"""The file that Python starts for a rank."""

import ast
from pathlib import Path

from echelon.launch import rank_program


def test_it_has_nothing_that_the_program_could_miss_when_its_names_are_gone() -> None:
    assert rank_program.__file__ is not None
    tree = ast.parse(Path(rank_program.__file__).read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
