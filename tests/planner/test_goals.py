"""What is best: speed, cost or memory."""

from dataclasses import replace

import pytest

import echelon as ec
from echelon.planner.goals import Ranking, parts_of, ranking
from echelon.planner.layout_space import SearchLimits
from echelon.planner.plan_search import search
from tests.planner.sizes import MODEL, STACK, cluster

LIMITS = SearchLimits(global_batch=32, keep=4, max_memory=6e9)
PRICED = replace(cluster(4, 2), price=2.0)


def by(goal: object) -> Ranking:
    return ranking(MODEL, PRICED, STACK, LIMITS, goal)  # type: ignore[arg-type]


def times(result: Ranking) -> list[float]:
    return [planned.time.total for _, planned in result.best]


def test_the_fastest_are_those_of_the_search() -> None:
    result = search(MODEL, PRICED, STACK, LIMITS)
    assert [planned for _, planned in by("tokens/s").best] == list(result.best)
    assert by("tokens/s").num_fitting == result.num_fitting


def test_the_least_memory_is_less_than_that_of_the_fastest() -> None:
    small = [planned.memory.total for _, planned in by("memory").best]
    fast = [planned.memory.total for _, planned in by("tokens/s").best]
    assert small == sorted(small)
    assert small[0] < min(fast)


def test_cheap_tokens_take_the_least_seconds_of_devices_also_on_fewer_hosts() -> None:
    cheap = by("cost")
    costs = [
        seconds * part.num_devices
        for seconds, (part, _) in zip(times(cheap), cheap.best, strict=True)
    ]
    assert costs == sorted(costs)
    every = [search(MODEL, part, STACK, LIMITS).best for part in parts_of(PRICED)]
    least = min(planned.time.total * planned.layout.num_ranks for best in every for planned in best)
    assert costs[0] == least
    assert cheap.best[0][0].hosts < 4  # fewer hosts wait less for each other
    assert cheap.best[0][1].layout.num_ranks == cheap.best[0][0].num_devices


def test_a_part_that_divides_nothing_is_left_out() -> None:
    limits = replace(LIMITS, fixed={"dp": 8, "shard": 1})
    result = ranking(MODEL, PRICED, STACK, replace(limits, max_memory=80e9), "cost")
    assert {part.hosts for part, _ in result.best} == {4}


def test_a_cost_without_a_price_is_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="no price of a device"):
        ranking(MODEL, cluster(1, 8), STACK, LIMITS, "cost")


def test_another_goal_is_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="goal is 'speed'; use one of"):
        by("speed")
