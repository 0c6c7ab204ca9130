"""Ranks measure themselves together, and the same sum of terms gives the time of the work back."""

import time

import pytest
import torch

import echelon as ec
from echelon.planner.rank_rates import RankRates, measure_rates, median_rates


def measured(ranks: int, world: str = "processes") -> list[RankRates]:
    rates: list[RankRates] = ec.run(measure_rates, ranks, world, args=(0.5, 1))
    return rates


@pytest.mark.slow
def test_two_processes_measure_at_the_same_time_within_their_limit() -> None:
    start_s = time.perf_counter()
    rates = measured(2)
    assert time.perf_counter() - start_s < 60
    for rate in rates:
        assert rate.matmul > 1e8
        assert 0 < rate.memory < 20
        assert 0 <= rate.contention <= 1
        assert rate.latency_s > 0
        assert rate.bus > 1e6
        assert rate.kernel_s < 1e-3
        assert rate.optimizer < 20 * rate.bandwidth


@pytest.mark.slow
def test_alone_there_is_nobody_to_wait_for() -> None:
    [rates] = measured(1, "threads")
    assert (rates.latency_s, rates.contention) == (0.0, 0.0)
    assert torch.get_num_threads() >= 1


def test_the_median_of_each_rate_counts() -> None:
    names = RankRates.__dataclass_fields__
    rates = [RankRates(**dict.fromkeys(names, value)) for value in (3.0, 1.0, 8.0)]
    assert median_rates(rates) == rates[0]
