"""Graders accept right solutions, refuse typical wrong ones, and say what a stored cell lacks."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.device.compiler import needs_compiler
from tests.notebooks.running import (
    NAMES,
    exercises,
    grade_of,
    grader_at_hand,
    run_cells,
    run_source,
)
from tests.notebooks.solutions import SOLVED, Solved

RACES = {"prefetcher", "offloaded"}  # on the simulated device
SLOW = {"by_layers", "zero_1", "parts", "two_steps"}  # each trains some dozen times
PARAMS = [
    pytest.param(
        solved,
        id=solved.exercise,
        marks=[
            *([pytest.mark.slow] if solved.exercise in SLOW else []),
            *([needs_compiler] if solved.exercise in RACES else []),
        ],
    )
    for solved in SOLVED
]


@pytest.fixture(params=PARAMS)
def solved(request: pytest.FixtureRequest) -> Iterator[tuple[Solved, dict[str, Any]]]:
    """An exercise, and the names that the cells before it define."""
    dtype = torch.get_default_dtype()
    namespace: dict[str, Any] = {"__name__": "notebook"}
    with grader_at_hand():
        try:
            run_cells(request.param.notebook, request.param.exercise, namespace)
            yield request.param, namespace
        finally:
            torch.set_default_dtype(dtype)


def graded(source: str, solved: Solved, namespace: dict[str, Any]) -> Any:
    run_source(source, namespace)
    return grade_of(solved.notebook, solved.exercise, namespace)


def solution_of(solved: Solved) -> str:
    source = exercises(solved.notebook)[solved.exercise] + "\n"
    for old, new in solved.changes:
        assert source.count(old) == 1
        source = source.replace(old, new)
    return source


@pytest.mark.slow
def test_right_solutions_pass_and_wrong_ones_are_told_what_is_missing(
    solved: tuple[Solved, dict[str, Any]],
) -> None:
    exercise, namespace = solved
    stored = graded(exercises(exercise.notebook)[exercise.exercise], exercise, namespace)
    assert not stored.passed
    assert re.search(exercise.unsolved, repr(stored))
    source = solution_of(exercise)
    right = graded(source, exercise, namespace)
    assert right.passed, right
    for mistake in exercise.mistakes:
        assert source.count(mistake.old) == 1, mistake
        grade = graded(source.replace(mistake.old, mistake.new), exercise, namespace)
        assert re.search(mistake.grade, repr(grade)), (mistake, grade)


def test_every_exercise_of_every_notebook_has_a_solution_here() -> None:
    stored = {(name, exercise) for name in NAMES for exercise in exercises(name)}
    assert stored == {(solved.notebook, solved.exercise) for solved in SOLVED}
    assert len(NAMES) == 7
