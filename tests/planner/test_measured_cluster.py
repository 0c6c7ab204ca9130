"""What was measured is a cluster and constants that ``step_time`` takes as any others."""

import pytest

from echelon.errors import ArgumentError
from echelon.planner.api import plan
from echelon.planner.layout import Layout, ShardedStates
from echelon.planner.measured_cluster import as_cluster, measure_cluster
from echelon.planner.rank_rates import RankRates
from echelon.planner.step_memory import step_memory
from echelon.planner.step_time import step_time
from tests.planner.sizes import MODEL

RATES = RankRates(
    matmul=50e9,
    kernel_s=1e-6,
    bandwidth=10e9,
    memory=0.5,
    attention=20e9,
    optimizer=5e9,
    bus=2e9,
    latency_s=1e-5,
    contention=0.5,
)


def test_ranks_are_devices_of_one_host_with_the_measured_rates() -> None:
    measured = as_cluster([RATES, RATES], 16e9)
    cluster, rates = measured.cluster, measured.stack.rates
    assert (cluster.hosts, cluster.num_devices, cluster.device.memory) == (1, 2, 8e9)
    assert rates.optimizer * cluster.device.bandwidth == RATES.optimizer
    assert (measured.stack.parameter_bytes, measured.stack.gradient_bytes) == (4, 4)


def test_terms_of_a_step_are_those_of_the_rates() -> None:
    measured = as_cluster([RATES, RATES], 16e9)
    alone = step_time(MODEL, Layout(), measured.cluster, measured.stack)
    assert alone.attention == pytest.approx(MODEL.layers * 3.5 * 2 * 2048 * 2048 * 1024 / 20e9)
    updated = MODEL.layers * MODEL.block_parameters + MODEL.embedding_parameters
    assert alone.optimizer == pytest.approx(42 * updated / 5e9)
    sharded = Layout(shard=2, sharded=ShardedStates.PARAMETERS)
    assert step_time(MODEL, sharded, measured.cluster, measured.stack).gather > 0
    replicas = step_time(MODEL, Layout(dp=2), measured.cluster, measured.stack)
    assert replicas.reduce > 4 * updated / 2e9 * 0.5


@pytest.mark.slow
def test_the_machine_at_hand_is_a_cluster() -> None:
    measured = measure_cluster(2, seconds=0.5)
    assert measured.cluster.num_devices == 2
    assert step_time(MODEL, Layout(dp=2), measured.cluster, measured.stack).total > 0


def test_no_rank_and_no_time_are_refused() -> None:
    with pytest.raises(ArgumentError, match="ranks"):
        measure_cluster(0)
    with pytest.raises(ArgumentError, match="seconds"):
        measure_cluster(2, seconds=0.0)


def test_a_measured_plan_computes_in_the_float32_that_was_measured() -> None:
    """The call, the plan, what the script does besides, and the bytes that are priced."""
    measured = as_cluster([RATES, RATES], 16e9)
    for shard in (1, 2):
        fixed = {"shard": shard, "microbatch": 1}
        priced = plan(MODEL, measured, global_batch=4, fixed=fixed).best
        usual = plan(MODEL, "2 A100", global_batch=4, fixed=fixed).best
        assert "bfloat16" not in priced.explain()
        assert "It computes in float32, as was measured." in priced.options()
        assert "bfloat16" in usual.explain()
        assert "precision" not in priced.plan.fsdp
        layout = priced.layout
        by_stack = [
            step_memory(MODEL, layout, stack).categories()
            for stack in (measured.stack, usual.stack)
        ]
        for name in ("parameters", "activations"):
            assert by_stack[0][name] == 2 * by_stack[1][name], name
        assert by_stack[0]["optimizer"] == by_stack[1]["optimizer"] * 8 / 12
