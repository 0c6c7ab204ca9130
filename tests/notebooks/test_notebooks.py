"""The notebooks run in a real kernel, and what is stored of their outputs is what they show."""

import re

import nbformat
import pytest

from tests.device.compiler import needs_compiler
from tests.notebooks.executing import executed, outputs
from tests.notebooks.running import FOLDER, NAMES, read

RACES = "7_races"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[needs_compiler] if name == RACES else []) for name in NAMES],
)
def test_a_notebook_runs_without_an_error_and_shows_what_is_stored(name: str) -> None:
    """It also shows that no output depends on a clock, a path or the order of threads."""
    assert outputs(executed(name)) == outputs(read(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_notebook_is_valid_executed_in_order_and_names_no_machine(name: str) -> None:
    notebook = read(name)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(not set(cell.metadata) - {"tags"} for cell in cells)
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert not re.search(r"/(tmp|home|root|work|usr|Users)/|ipykernel_\d|\d{4}-\d\d-\d\d", text)
    assert len(text) < 600_000


@pytest.mark.parametrize("name", NAMES)
def test_each_notebook_ends_in_exercises_whose_graders_say_what_is_missing(name: str) -> None:
    cells = read(name).cells
    grades = [cell for cell in cells if cell.metadata.get("tags", [])[:1] == ["grade"]]
    assert len(grades) >= 2
    assert cells[-1] is grades[-1]
    for cell in grades:
        shown = cell.outputs[-1]["data"]["text/plain"]
        assert "not passed yet" in shown
        assert "missing  " in shown


def test_the_five_classic_hangs_are_named_with_their_lines_in_under_a_second() -> None:
    shown = ["".join(o.get("text", "") for o in show) for show in outputs(read("5_hangs"))]
    named = [text for text in shown if "named in under a second: True" in text]
    assert len(named) == 6  # five, and two that both receive
    assert not any("False" in text for text in shown)
    assert all(re.search(r"at cell In\[\d+\]:\d+ in \w+", text) for text in named)


def test_each_race_is_named_with_its_lines_and_mended() -> None:
    shown = ["".join(o.get("text", "") for o in show) for show in outputs(read(RACES))]
    named = [text for text in shown if "1 race\n" in text]
    assert len(named) == 4
    assert all(len(re.findall(r"cell In\[\d+\]:\d+, in <module>\n", text)) == 2 for text in named)
    assert sum(text.endswith("no races\n") for text in shown) == 4
