import pytest

from echelon.planner.collective_time import rings_of
from echelon.planner.cost_table import CostTable
from echelon.planner.layout import Layout, Recompute, ShardedStates
from echelon.planner.stage_time import block_time, head_time
from tests.planner.sizes import MODEL, RATES, STACK, cluster

LAYOUTS = [
    Layout(tp=2, cp=2, shard=2, dp=2, sharded=ShardedStates.GRADIENTS),
    Layout(tp=2, pp=4, dp=2, microbatches=8, microbatch=2),
    Layout(tp=2, pp=4, dp=2, microbatches=8, microbatch=2, recompute=Recompute.BLOCKS),
    Layout(shard=16, sharded=ShardedStates.PARAMETERS),
]


def test_a_table_has_the_costs_that_each_layout_has_alone() -> None:
    place = cluster(2, 8)
    table = CostTable(MODEL, place, STACK)
    for layout in LAYOUTS + LAYOUTS[::-1]:
        rings = rings_of(layout, place, RATES)
        assert table.rings(layout) == rings
        assert table.block(layout, rings) == block_time(MODEL, layout, place, STACK, rings)
        assert table.head(layout) == head_time(MODEL, layout, place, STACK)


def test_layouts_that_compute_the_same_share_a_block() -> None:
    table = CostTable(MODEL, cluster(2, 8), STACK)
    many, few = Layout(dp=16), Layout(shard=16, sharded=ShardedStates.PARAMETERS)
    block = table.computed_block(many, table.rings(many))
    assert table.computed_block(few, table.rings(few)) is block
    assert table.block(few, table.rings(few)).computed == pytest.approx(block.total)
