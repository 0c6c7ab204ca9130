"""The benchmark of the planner: what noise of published times leaves of a choice."""

import pytest

from tests import test_benchmarks

folder_on_path = test_benchmarks.folder_on_path
NEAR = [[(1.0, 9.0), (1.01, 5.0), (1.02, 7.0)]]
FAR = [[(1.0, 9.0), (2.0, 5.0), (3.0, 7.0)]]


def test_a_choice_costs_what_the_chosen_plan_took_more_than_the_best() -> None:
    from planner import choice_of

    assert choice_of(NEAR[0]) == (pytest.approx(0.8), pytest.approx(-0.5))


def test_noise_costs_an_exact_prediction_regret_where_plans_are_near() -> None:
    from planner import exact_choice

    regret, correlation = exact_choice(NEAR, 0.03)
    assert 0.005 < regret < 0.06
    assert 0.1 < correlation < 0.7
    assert exact_choice(FAR, 0.03) == (0.0, pytest.approx(1.0))


def test_an_exact_prediction_without_noise_costs_nothing() -> None:
    from planner import exact_choice

    assert exact_choice(NEAR, 0.0) == (0.0, pytest.approx(1.0))
