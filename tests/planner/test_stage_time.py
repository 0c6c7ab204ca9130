from dataclasses import replace

import pytest

from echelon.planner.cluster import Cluster
from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.stage_time import BlockTime, stage_seconds
from echelon.planner.step_time import LayoutTimer
from tests.planner.sizes import HOST, MODEL, STACK, cluster


def time_of(layout: Layout, place: Cluster | None = None) -> BlockTime:
    timer = LayoutTimer(MODEL, place or cluster(1, 8), STACK)
    return timer.block(layout, timer.rings(layout))


def test_recomputed_blocks_run_forward_twice() -> None:
    plain, again = time_of(Layout()), time_of(Layout(recompute=Recompute.BLOCKS))
    assert again.total == pytest.approx(plain.total + plain.forward.total)


def test_tensor_parallelism_reduces_the_residual_stream_four_times() -> None:
    nbytes = 2 * 2048 * 1024
    assert time_of(Layout(tp=2)).exchanged == pytest.approx(4 * nbytes / 100e9)
    again = time_of(Layout(tp=2, recompute=Recompute.BLOCKS))
    assert again.exchanged == pytest.approx(6 * nbytes / 100e9)


def test_a_gather_that_takes_longer_than_the_computation_is_waited_for() -> None:
    layout = Layout(shard=8, sharded=ShardedStates.PARAMETERS)
    place = replace(cluster(8, 1), network=1e9)
    block = time_of(layout, place)
    one_pass = 7 / 8 * 2 * MODEL.block_parameters / 1e9
    computed = block.forward.total + block.backward.total
    assert block.waiting == pytest.approx(3 * one_pass - computed)


def test_the_head_belongs_to_the_last_stage() -> None:
    assert stage_seconds([2, 2, 1], block=1.0, head=0.5, hop=0.1) == pytest.approx([2.2, 2.2, 1.7])


def test_the_host_has_shards_and_their_gradients_at_the_rate_of_its_link() -> None:
    timer = LayoutTimer(MODEL, replace(cluster(1, 8), host=HOST), STACK)
    layout = Layout(shard=4, sharded=ShardedStates.PARAMETERS)
    seconds = 2 * 1e6 / 4 / 20e9  # 16 bits of a quarter
    for offload, copies in (
        (HostStates.NOTHING, (0.0, 0.0)),
        (HostStates.OPTIMIZER, (0.0, seconds)),
        (HostStates.ALL, (seconds, seconds)),
    ):
        assert timer.host_copies(replace(layout, offload=offload), 1e6) == copies
