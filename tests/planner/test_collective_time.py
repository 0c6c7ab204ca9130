from dataclasses import replace

import pytest

from echelon.planner.collective_time import ring
from echelon.planner.layout import Layout
from echelon.planner.step_time import LayoutTimer
from tests.planner.sizes import MODEL, RATES, STACK, cluster


def test_a_ring_inside_of_a_host_has_the_bus() -> None:
    inside = ring(4, 2, cluster(2, 8), RATES)
    assert not inside.between_hosts
    assert inside.one_pass(4e9) == pytest.approx(3 / 4 * 4e9 / 100e9)


def test_a_ring_with_one_rank_in_each_host_has_its_share_of_the_network() -> None:
    between = ring(2, 8, cluster(2, 8), RATES)
    assert between.between_hosts
    assert between.rate == pytest.approx(100e9 / 8)


def test_a_ring_with_all_ranks_of_a_host_has_the_whole_network() -> None:
    assert ring(16, 1, cluster(2, 8), RATES).rate == pytest.approx(100e9)


def test_the_latency_of_a_ring_grows_with_its_ranks_and_its_hosts() -> None:
    rates = replace(RATES, latency_s=10e-6, network_latency_s=30e-6)
    assert ring(8, 1, cluster(4, 8), rates).latency == pytest.approx(10e-6 * (1 + 7 / 5))
    between = ring(32, 1, cluster(4, 8), rates)
    assert between.latency == pytest.approx(10e-6 + (32 - 4) * 2e-6 + 3 * 30e-6)
    assert ring(4, 8, cluster(4, 8), rates).latency == pytest.approx(10e-6 + 3 * 30e-6)


def test_small_messages_between_many_hosts_are_reduced_by_a_tree() -> None:
    rates = replace(RATES, network_latency_s=30e-6)
    many = ring(64, 1, cluster(64, 1), rates)
    up_and_down = 2 * 1e3 / (0.92 * 100e9) + 2 * 6 * 30e-6
    assert many.all_reduce(1e3) == pytest.approx(up_and_down)
    assert many.all_reduce(1e12) == pytest.approx(2 * many.one_pass(1e12))


def test_one_rank_sends_nothing() -> None:
    assert ring(1, 1, cluster(1, 8), RATES).all_reduce(1e9) == 0.0


def test_tp_is_innermost_and_pp_outermost() -> None:
    rings = LayoutTimer(MODEL, cluster(4, 8), STACK).rings(Layout(tp=8, shard=2, pp=2))
    assert not rings.tp.between_hosts
    assert rings.shard.between_hosts
    assert rings.message.between_hosts
