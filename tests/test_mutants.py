"""One-line faults are drawn from all rooms, and the test that finds one is named."""

import ast
from pathlib import Path

import pytest

from tests import mutants
from tests.mutants import Mutant

SOURCE = "def is_more(a, b):\n    return a > b\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one file of source and a test of it, and without a plugin for pytest."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "src/echelon").mkdir(parents=True)
    (tmp_path / "src/echelon/__init__.py").touch()
    (tmp_path / "src/echelon/parts.py").write_text(SOURCE)
    (tmp_path / "tests").mkdir()
    test = "from echelon.parts import is_more\n\n\ndef test_more():\n    assert is_more(2, 1)\n"
    (tmp_path / "tests/test_parts.py").write_text(test)
    return tmp_path


@pytest.mark.slow
def test_the_same_seed_draws_the_same_mutants_and_each_compiles() -> None:
    drawn = mutants.draw(30, 5)
    assert drawn == mutants.draw(30, 5)
    rooms = {Path(mutant.path).parts[0] for mutant in drawn}
    assert len(drawn) == 30
    assert {"comm", "fsdp", "laboratory", "pipeline", "planner"} <= rooms
    for mutant in drawn:
        lines = (mutants.ROOT / "src/echelon" / mutant.path).read_text().splitlines()
        assert lines[mutant.line - 1] == mutant.before != mutant.after
        lines[mutant.line - 1] = mutant.after
        ast.parse("\n".join(lines))


@pytest.mark.parametrize(
    ("before", "after", "killed_by"),
    [
        ("    return a > b", "    return a < b", "tests/test_parts.py::test_more"),
        ("    return a > b", "    return a >= b", ""),  # the test has no equal numbers
        ("    return b < a", "    return b > a", "gone"),
    ],
)
def test_the_test_that_finds_a_mutant_is_named_and_the_source_stays(
    tree: Path, before: str, after: str, killed_by: str
) -> None:
    tried = mutants.kill(Mutant("parts.py", 1, before, after), tree)
    assert tried.killed_by == killed_by
    assert (tree / "src/echelon/parts.py").read_text() == SOURCE


def test_a_test_that_fails_without_the_mutant_too_kills_nothing(tree: Path) -> None:
    (tree / "tests/test_parts.py").write_text("def test_broken():\n    assert False\n")
    tried = mutants.kill(Mutant("parts.py", 2, "    return a > b", "    return None"), tree)
    assert str(tried.killed_by).startswith("fails without it")
