from dataclasses import replace

import pytest

from echelon.planner.layout import Layout, Recompute, ShardedStates
from echelon.planner.stage_time import head_time
from echelon.planner.step_time import step_time
from tests.planner.sizes import MODEL, STACK, cluster

LAYOUTS = [
    Layout(),
    Layout(dp=8),
    Layout(shard=8, sharded=ShardedStates.PARAMETERS, microbatches=2),
    Layout(tp=2, pp=2, dp=2, microbatches=8, recompute=Recompute.BLOCKS),
    Layout(cp=2, shard=4, sharded=ShardedStates.OPTIMIZER),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_term_is_negative_and_the_total_is_their_sum(layout: Layout) -> None:
    time = step_time(MODEL, layout, cluster(1, 8), STACK)
    assert min(time.terms().values()) >= 0
    assert time.total == pytest.approx(sum(time.terms().values()))


def test_the_bubble_of_equal_stages_is_that_of_1f1b() -> None:
    layout = Layout(pp=4, microbatches=8)
    time = step_time(MODEL, layout, cluster(1, 8), STACK)
    last = (time.matmul + time.attention + time.memory + time.message) / 8
    head = head_time(MODEL, layout, cluster(1, 8), STACK).total
    assert time.bubble == pytest.approx(3 * (last - head))


def test_chunks_divide_the_bubble() -> None:
    model = replace(MODEL, layers=8)
    bubbles = [
        step_time(model, Layout(pp=4, chunks=v, microbatches=8), cluster(1, 8), STACK).bubble
        for v in (1, 2)
    ]
    assert bubbles[1] == pytest.approx(bubbles[0] / 2)


def test_a_slower_network_is_never_faster() -> None:
    layout = Layout(dp=16)
    slow, fast = (
        step_time(MODEL, layout, replace(cluster(2, 8), network=rate), STACK).total
        for rate in (1e9, 100e9)
    )
    assert slow > fast


def test_gradients_that_overlap_the_backward_cost_their_last_part() -> None:
    layout = Layout(dp=8)
    alone = step_time(MODEL, layout, cluster(1, 8), replace(STACK, overlaps_reduction=False))
    overlapped = step_time(MODEL, layout, cluster(1, 8), STACK)
    assert 0 < overlapped.reduce < alone.reduce
