import math
import random
from dataclasses import replace

import pytest

import echelon as ec
from echelon.planner.layout_space import LayoutSpace, SearchLimits
from echelon.planner.plan_search import search
from echelon.planner.what_if import (
    checkpoint_bytes,
    cluster_of,
    daly_interval,
    failure_cost,
    lost_time,
    scaled,
    young_interval,
)
from tests.planner.sizes import HOST, MODEL, STACK, cluster


def test_each_size_has_the_plan_that_a_search_for_it_finds() -> None:
    limits = SearchLimits(global_batch=32)
    points = scaled(LayoutSpace(MODEL, cluster(1, 4), STACK, limits), [2, 4, 8])
    assert [point.cluster.num_devices for point in points] == [2, 4, 8]
    for point, place in zip(points, (cluster(1, 2), cluster(1, 4), cluster(2, 4)), strict=True):
        best = search(LayoutSpace(MODEL, place, STACK, limits)).best[0]
        assert point.plan is not None
        assert point.plan.layout == best.layout
        assert point.step_s == best.time.total
        assert point.tokens_per_second == pytest.approx(32 * 2048 / best.time.total)
        hours = place.num_devices * best.time.total * (1e9 / (32 * 2048)) / 3600
        assert point.device_hours(1e9) == pytest.approx(hours)


def test_a_size_without_a_plan_says_why() -> None:
    limits = SearchLimits(global_batch=12, fixed={"pp": 1, "tp": 1, "cp": 1}, max_memory=1e6)
    too_small, no_divisor = scaled(LayoutSpace(MODEL, cluster(1, 4), STACK, limits), [4, 32])
    assert "recompute: rank 0 would have" in too_small.reason
    assert "no plan divides 32 devices" in no_divisor.reason
    for point in (too_small, no_divisor):
        assert point.plan is None
        assert point.step_s == math.inf
        assert point.tokens_per_second == 0


def test_a_part_of_a_host_has_its_part_of_the_network() -> None:
    part = cluster_of(cluster(4, 8), 2)
    assert (part.hosts, part.devices_per_host, part.network) == (1, 2, 100e9 / 4)
    with pytest.raises(ec.ArgumentError, match="size is 12: give a multiple of the 8 devices"):
        cluster_of(cluster(4, 8), 12)


def test_a_part_of_a_host_has_its_part_of_the_memory() -> None:
    place = replace(cluster(4, 8), host=HOST)
    assert cluster_of(place, 2).host == replace(HOST, memory=2.5e11, bandwidth=1e11)
    assert cluster_of(place, 16).host == HOST


def test_intervals_are_those_of_a_hand_calculation() -> None:
    assert young_interval(save_s=200.0, mtbf_s=10_000.0) == pytest.approx(2000.0)
    # r = sqrt(200 / 20000) = 0.1
    by_hand = 2000 * (1 + 0.1 / 3 + 0.01 / 9) - 200
    assert daly_interval(save_s=200.0, mtbf_s=10_000.0) == pytest.approx(by_hand)
    assert daly_interval(save_s=50.0, mtbf_s=20.0) == 20.0


@pytest.mark.parametrize(("save_s", "mtbf_s"), [(10.0, 1e5), (60.0, 3600.0), (300.0, 3600.0)])
def test_no_other_interval_loses_less(save_s: float, mtbf_s: float) -> None:
    best = daly_interval(save_s, mtbf_s)
    lost = lost_time(best, save_s, mtbf_s, restart_s=100.0)
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert lost_time(factor * best, save_s, mtbf_s, restart_s=100.0) > lost


def test_lost_time_is_that_of_trainings_with_failures_at_random() -> None:
    draw = random.Random(0)
    interval, save, mtbf, restart = 500.0, 50.0, 3000.0, 120.0
    total, segments = 0.0, 20_000
    for _ in range(segments):
        needed = interval + save
        while (until := draw.expovariate(1 / mtbf)) < needed:
            total += until
            needed = restart + interval + save  # a restart can fail, too
        total += needed
    seen = total / (segments * interval) - 1
    assert lost_time(interval, save, mtbf, restart) == pytest.approx(seen, rel=0.03)


def test_without_failures_only_the_saves_are_lost() -> None:
    assert lost_time(1000.0, 10.0, mtbf_s=1e12, restart_s=60.0) == pytest.approx(0.01, rel=1e-4)
    assert lost_time(1000.0, 10.0, mtbf_s=1.0, restart_s=60.0) == math.inf


def test_more_hosts_save_faster_and_fail_more_often() -> None:
    few, many = (
        failure_cost(MODEL, cluster(hosts, 8), mtbf_s=1e6, save_rate=1e8, restart_s=100.0)
        for hosts in (1, 4)
    )
    assert checkpoint_bytes(MODEL) == 12 * MODEL.num_parameters
    assert few.save_s == pytest.approx(12 * MODEL.num_parameters / 1e8)
    assert many.save_s == pytest.approx(few.save_s / 4)
    assert many.interval_s == pytest.approx(daly_interval(few.save_s / 4, 1e6 / 4))
    assert few.lost == lost_time(few.interval_s, few.save_s, 1e6, 100.0)


@pytest.mark.parametrize("name", ["mtbf_s", "save_rate", "restart_s"])
def test_wrong_rates_are_refused(name: str) -> None:
    options = {"mtbf_s": 1e5, "save_rate": 1e9, "restart_s": 60.0, name: 0.0}
    with pytest.raises(ec.ArgumentError, match=name):
        failure_cost(MODEL, cluster(1, 8), **options)
