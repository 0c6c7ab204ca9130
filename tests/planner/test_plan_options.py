"""A layout becomes an ec.Plan, or a sentence says why not."""

from dataclasses import replace

import pytest
import torch

import echelon as ec
from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.layout_space import SearchLimits
from echelon.planner.plan_options import (
    beside_plan,
    layout_text,
    missing_in_plan,
    plan_of,
    plan_options,
    plan_text,
)
from tests.planner.sizes import HOST, MODEL, cluster, layouts


def every_layout() -> list[Layout]:
    limits = SearchLimits(global_batch=32, plans_only=True, fixed={"tp": 1, "cp": 1, "ep": 1})
    return layouts(MODEL, replace(cluster(2, 4), host=HOST), limits)


@pytest.mark.slow
def test_every_layout_of_a_search_for_plans_is_a_plan_of_as_many_ranks() -> None:
    every = every_layout()
    assert len(every) > 50
    assert {layout.sharded for layout in every} == set(ShardedStates)
    assert {layout.offload for layout in every} == set(HostStates)
    for layout in every:
        plan = plan_of(layout)
        assert (plan.pp, plan.dp, plan.shard) == (layout.pp, layout.dp, layout.shard)
        assert plan.num_ranks == 8
        offload = plan.fsdp.get("offload", ec.Offload.NONE)
        assert (offload is ec.Offload.NONE) == (layout.offload is HostStates.NOTHING)
        if layout.pp > 1:
            assert (plan.microbatches, plan.chunks) == (layout.microbatches, layout.chunks)
            assert plan.schedule == layout.schedule_name
            assert plan.pipeline.get("recompute", False) == (layout.recompute is Recompute.BLOCKS)


@pytest.mark.slow
def test_the_text_of_a_plan_is_the_plan() -> None:
    for layout in every_layout():
        assert eval(plan_text(layout), {"ec": ec, "torch": torch}) == plan_of(layout)


@pytest.mark.parametrize(
    ("sharded", "strategy"),
    [
        (ShardedStates.OPTIMIZER, ec.Strategy.SHARD_OPTIMIZER),
        (ShardedStates.GRADIENTS, ec.Strategy.SHARD_GRAD_OP),
        (ShardedStates.PARAMETERS, ec.Strategy.FULL_SHARD),
    ],
)
def test_what_is_sharded_is_the_strategy(sharded: ShardedStates, strategy: ec.Strategy) -> None:
    assert plan_of(Layout(shard=4, sharded=sharded)).strategy is strategy


def test_sharded_gradients_of_a_pipeline_are_reduced_in_each_microbatch() -> None:
    sharded = Layout(pp=2, shard=2, microbatches=4, sharded=ShardedStates.GRADIENTS)
    assert plan_of(sharded).pipeline == {"reduce_every": "microbatch"}


def test_shards_compute_in_16_bits_but_not_where_stages_share_a_parameter() -> None:
    layout = Layout(pp=2, shard=2, microbatches=4, sharded=ShardedStates.OPTIMIZER)
    assert plan_of(layout).fsdp["precision"].compute is torch.bfloat16
    assert "fsdp" not in plan_options(layout, tied=True)
    assert any("autocast" in sentence for sentence in beside_plan(layout, tied=True))
    assert not any("autocast" in sentence for sentence in beside_plan(layout))


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(tp=2, cp=4), "no tp and no cp, and this layout has tp=2, cp=4: fix tp=1, cp=1"),
        (Layout(tp=2), "or search with axes 'plan'"),
        (Layout(ep=2, dp=2), "no ep"),
        (Layout(dp=2, shard=2, sharded=ShardedStates.OPTIMIZER), "fix dp=1"),
        (Layout(pp=2, microbatches=2, recompute=Recompute.ATTENTION), "only attention"),
    ],
)
def test_what_no_plan_says_is_refused_with_the_axis(layout: Layout, sentence: str) -> None:
    assert sentence in missing_in_plan(layout)
    for refused in (plan_of, plan_text, plan_options):
        with pytest.raises(ec.UnsupportedError, match=sentence):
            refused(layout)


def test_what_the_script_does_is_said() -> None:
    accumulates = Layout(dp=2, microbatches=4, microbatch=2, recompute=Recompute.BLOCKS)
    text = " ".join(beside_plan(accumulates))
    assert "calls backward 4 times for each step, each time with 2 sequences" in text
    assert "no_sync" in text
    assert "torch.utils.checkpoint" in text
    sharded = Layout(shard=2, microbatches=4, sharded=ShardedStates.PARAMETERS)
    assert "no_sync" not in " ".join(beside_plan(sharded))


def test_a_layout_is_a_short_text() -> None:
    layout = Layout(
        tp=2,
        pp=2,
        shard=4,
        chunks=2,
        microbatches=8,
        sharded=ShardedStates.GRADIENTS,
        recompute=Recompute.BLOCKS,
    )
    assert layout_text(layout) == "tp=2,pp=2,shard=4 (gradients) chunks=2 recompute"
    assert layout_text(Layout()) == "one device"
