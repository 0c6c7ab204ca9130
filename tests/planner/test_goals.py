"""What is best: speed, cost or memory."""

from dataclasses import replace

import pytest

import echelon as ec
from echelon.planner.goals import parts_of, ranking
from echelon.planner.layout_space import LayoutSpace, SearchLimits
from echelon.planner.plan_search import SearchResult, search
from tests.planner.sizes import MODEL, STACK, cluster

LIMITS = SearchLimits(global_batch=32, keep=4, max_memory=6e9)
PRICED = replace(cluster(4, 2), price=2.0)


def by(goal: object) -> SearchResult:
    return ranking(LayoutSpace(MODEL, PRICED, STACK, LIMITS), goal)  # type: ignore[arg-type]


def test_the_fastest_are_those_of_the_search() -> None:
    result = search(LayoutSpace(MODEL, PRICED, STACK, LIMITS))
    assert by("tokens/s").best == result.best
    assert by("tokens/s").num_fitting == result.num_fitting


def test_the_least_memory_is_less_than_that_of_the_fastest() -> None:
    small = [plan.memory.total for plan in by("memory").best]
    fast = [plan.memory.total for plan in by("tokens/s").best]
    assert small == sorted(small)
    assert small[0] < min(fast)


def test_cheap_tokens_take_the_least_seconds_of_devices_also_on_fewer_hosts() -> None:
    cheap = by("cost")
    costs = [plan.seconds * plan.cluster.num_devices for plan in cheap.best]
    assert costs == sorted(costs)
    every = [search(LayoutSpace(MODEL, part, STACK, LIMITS)).best for part in parts_of(PRICED)]
    least = min(plan.seconds * plan.layout.num_ranks for best in every for plan in best)
    assert costs[0] == least
    assert cheap.best[0].cluster.hosts < 4  # fewer hosts wait less for each other
    assert cheap.best[0].layout.num_ranks == cheap.best[0].cluster.num_devices


def test_a_part_that_divides_nothing_is_left_out() -> None:
    limits = replace(LIMITS, fixed={"dp": 8, "shard": 1})
    result = ranking(LayoutSpace(MODEL, PRICED, STACK, replace(limits, max_memory=80e9)), "cost")
    assert {plan.cluster.hosts for plan in result.best} == {4}


def test_a_cost_without_a_price_is_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="no price of a device"):
        ranking(LayoutSpace(MODEL, cluster(1, 8), STACK, LIMITS), "cost")


def test_another_goal_is_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="goal is 'speed'; use one of"):
        by("speed")
