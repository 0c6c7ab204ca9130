"""A plan that fits says its time, its memory, its cost and its ec.Plan."""

from dataclasses import replace

import pytest

import echelon as ec
from echelon.planner.layout import Layout, ShardedStates
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.step_memory import step_memory
from echelon.planner.step_time import step_time
from tests.planner.sizes import MODEL, STACK, cluster


def priced(layout: Layout, price: float | None = None) -> PricedPlan:
    place = replace(cluster(2, 4), price=price)
    return PricedPlan(
        model=MODEL,
        cluster=place,
        stack=STACK,
        layout=layout,
        time=step_time(MODEL, layout, place, STACK),
        memory=step_memory(MODEL, layout, STACK),
        limit=80e9,
    )


SHARDED = Layout(pp=2, shard=4, microbatches=4, sharded=ShardedStates.OPTIMIZER)


def test_tokens_and_flops_follow_from_the_time() -> None:
    plan = priced(SHARDED)
    assert plan.seconds == plan.time.total
    assert plan.tokens_per_second == pytest.approx(16 * 2048 / plan.seconds)
    flops = MODEL.flops() * 16 / plan.seconds
    assert plan.mfu == pytest.approx(flops / 8 / 400e12)


def test_a_million_tokens_cost_the_hours_of_all_devices() -> None:
    plan = priced(SHARDED, price=3.6)
    # 8 devices of 3.6 an hour are 0.008 a second.
    assert plan.cost == pytest.approx(0.008 * 1e6 / plan.tokens_per_second)
    assert priced(SHARDED).cost is None


def test_the_plan_is_an_ec_plan() -> None:
    plan = priced(SHARDED)
    assert (plan.plan.pp, plan.plan.shard, plan.plan.microbatches) == (2, 4, 4)
    assert plan.schedule == plan.plan.schedule == "1f1b"


def test_a_plan_with_tensor_parallelism_is_priced_and_is_no_ec_plan() -> None:
    plan = priced(Layout(tp=8, microbatches=16))
    with pytest.raises(ec.UnsupportedError, match=r"an ec\.Plan has no tp"):
        _ = plan.plan
    assert "No ec.Plan: an ec.Plan has no tp" in plan.explain()


def test_an_explanation_has_every_term_and_every_category_and_adds_up() -> None:
    plan = priced(SHARDED, price=1.0)
    lines = plan.explain().splitlines()
    shares = [float(line.split()[-1].rstrip("%")) for line in lines if line.endswith("%")]
    assert len(shares) == len(plan.time.terms())
    assert sum(shares) == pytest.approx(100, abs=0.6)
    gib = [float(line.split()[-2]) for line in lines if line.endswith(" GiB")]
    assert sum(gib) == pytest.approx(plan.memory.total / 2**30, abs=0.05)
    assert "ec.Plan(pp=2, shard=4" in lines[1]
    assert "for a million tokens" in lines[0]


def test_what_bounds_a_plan_is_in_parts_of_the_step() -> None:
    plan = priced(SHARDED)
    name, share = plan.bounds().split(", ")[0].split()
    largest = max(value for term, value in plan.time.terms().items() if term != "matmul")
    assert plan.time.terms()[name] == largest
    assert share == f"{largest / plan.seconds:.0%}"


def test_its_text_is_short() -> None:
    plan = priced(SHARDED)
    assert str(plan) == "pp=2,shard=4 (optimizer)"
    assert repr(plan).startswith("<PricedPlan pp=2,shard=4 (optimizer): ")
