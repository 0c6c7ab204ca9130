import pytest

from echelon.planner.layout import Layout, Recompute, ShardedStates
from echelon.planner.layout_space import SearchLimits
from echelon.planner.step_time import LayoutTimer, step_time
from tests.planner.sizes import MODEL, STACK, cluster, layouts

LAYOUTS = [
    Layout(tp=2, cp=2, shard=2, dp=2, sharded=ShardedStates.GRADIENTS),
    Layout(tp=2, pp=4, dp=2, microbatches=8, microbatch=2),
    Layout(tp=2, pp=4, dp=2, microbatches=8, microbatch=2, recompute=Recompute.BLOCKS),
    Layout(shard=16, sharded=ShardedStates.PARAMETERS),
]


def test_the_costs_that_layouts_share_are_those_that_each_has_alone() -> None:
    place = cluster(2, 8)
    timer = LayoutTimer(MODEL, place, STACK)
    for layout in LAYOUTS + LAYOUTS[::-1]:
        alone = LayoutTimer(MODEL, place, STACK)
        rings = alone.rings(layout)
        assert timer.rings(layout) == rings
        assert timer.block(layout, rings) == alone.block(layout, rings)
        assert timer.head(layout) == alone.head(layout)


def test_layouts_that_compute_the_same_share_a_block() -> None:
    timer = LayoutTimer(MODEL, cluster(2, 8), STACK)
    many, few = Layout(dp=16), Layout(shard=16, sharded=ShardedStates.PARAMETERS)
    block = timer.computed_block(many, timer.rings(many))
    assert timer.computed_block(few, timer.rings(few)) is block
    assert timer.block(few, timer.rings(few)).computed == pytest.approx(block.total)


def test_layouts_are_timed_as_each_is_alone() -> None:
    place = cluster(2, 4)
    timer = LayoutTimer(MODEL, place, STACK)
    for layout in layouts(MODEL, place, SearchLimits(global_batch=8)):
        assert timer.step_time(layout) == step_time(MODEL, layout, place, STACK)
