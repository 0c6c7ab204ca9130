"""Names of steps and files are recognised, and nothing else is one."""

import pytest

from echelon.checkpoint.records import (
    file_name,
    step_name,
    step_of,
)
from echelon.errors import ArgumentError


def test_names_of_steps_sort_as_steps_do() -> None:
    steps = [0, 9, 10, 99_999, 10**6, 10**9 - 1]
    names = [step_name(step) for step in steps]
    assert names == sorted(names)
    assert [step_of(name) for name in names] == steps
    for step in (-1, 10**9):
        with pytest.raises(ArgumentError, match=f"step is {step}"):
            step_name(step)


@pytest.mark.parametrize(
    "name",
    [
        *("", "step-", "step-10", "step-0000000010", "step-00000001", "step-00000001x"),
        *("step-000000010.tmp", ".step-000000010", "step-000000010/", "step-000000010\n"),
        *(
            "Step-000000010",
            "step_000000010",
            "step-+00000010",
            "step-٠٠٠٠٠٠٠١٠",
            "../step-000000010",
        ),
    ],
)
def test_only_the_name_of_a_committed_step_is_one(name: str) -> None:
    assert step_of(name) is None


def test_names_of_files_tell_ranks_apart() -> None:
    assert [file_name(rank) for rank in (0, 99_999, 100_000)] == [
        "rank-00000.safetensors",
        "rank-99999.safetensors",
        "rank-100000.safetensors",
    ]
    with pytest.raises(ArgumentError, match="rank is -1"):
        file_name(-1)
