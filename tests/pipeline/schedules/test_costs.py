"""Costs are completed where some are left out, and refused where they are wrong."""

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline import schedule, simulate


def test_a_fused_pair_may_cost_less_than_its_parts() -> None:
    fused = schedule("dualpipe-v", 8, 16, 4, fused=True)
    apart = simulate(fused, {"F": 1, "B": 2})
    together = simulate(fused, {"F": 1, "B": 2, "F&B": 2})
    assert together.makespan < apart.makespan
    assert simulate(fused, {"F": 1, "B": 2, "F&B": 3}).makespan == apart.makespan


def test_halves_of_a_backward_follow_from_the_whole_and_the_other_half() -> None:
    found = schedule("zb-h1", 4, 8, 4)
    by_parts = simulate(found, {"F": 1, "I": 2, "W": 1}).makespan
    assert simulate(found, {"F": 1, "B": 3, "I": 2}).makespan == by_parts
    assert simulate(found, {"F": 1, "B": 3, "W": 1}).makespan == by_parts
    assert simulate(found, {"B": 2}).makespan == simulate(found).makespan


@pytest.mark.parametrize(
    ("costs", "sentence"),
    [
        ({"X": 1}, "costs has 'X'; its names are F, B, I, W, F&B, hop"),
        ({"F": -1}, "costs['F'] has -1; a cost is a number >= 0"),
        ({"F": [1, 2, 3]}, "or one for each of the 2 stages"),
        ({"F": "12"}, "costs['F'] is '12'"),
        ({"hop": [1]}, "costs['hop'] is [1]; give one number"),
        ({"hop": -1}, "costs['hop'] is -1"),
        ({"B": 1, "I": 2}, "a part of the backward that is more than B"),
        ({"F": float("nan")}, "a cost is a number >= 0"),
    ],
)
def test_costs_that_are_none_are_refused(costs, sentence) -> None:
    with pytest.raises(ArgumentError) as info:
        simulate(schedule("1f1b", 2, 2, 2), costs)
    assert sentence in str(info.value)
