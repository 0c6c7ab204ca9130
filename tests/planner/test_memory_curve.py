"""The memory of the fullest rank along the schedule of a plan."""

from dataclasses import replace

import pytest

from echelon.planner.layout import Layout, ShardedStates
from echelon.planner.layout_space import LayoutSpace, SearchLimits
from echelon.planner.plan_timeline import MemoryMoment, memory_curve, simulated
from echelon.planner.ranked_plans import Plans
from echelon.planner.refusal import peak_moment
from tests.planner.sizes import MODEL, STACK, cluster
from tests.planner.test_priced_plan import priced

FIXED = {"pp": 4, "tp": 1, "cp": 1, "chunks": 1, "microbatch": 1}
LAYOUTS = [
    Layout(dp=8, microbatches=2),
    Layout(pp=4, dp=2, microbatches=8),
    Layout(pp=2, shard=4, chunks=2, microbatches=4, sharded=ShardedStates.OPTIMIZER),
    Layout(pp=2, dp=4, chunks=2, microbatches=8, schedule="v-half"),
    Layout(pp=2, dp=4, chunks=2, microbatches=8, schedule="dualpipe-v"),
]


def curve(layout: Layout) -> list[MemoryMoment]:
    plan = priced(layout)
    return memory_curve(plan, simulated(plan))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_its_highest_point_is_the_peak_of_the_plan(layout: Layout) -> None:
    memory = priced(layout).memory
    always = memory.total - memory.gradients - memory.activations
    highest = max(moment.gradients + moment.activations for moment in curve(layout))
    assert highest + always == pytest.approx(memory.total)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_it_begins_and_ends_without_activations_and_ends_with_gradients(layout: Layout) -> None:
    moments = curve(layout)
    assert moments[0] == MemoryMoment(0.0, 0.0, 0.0)
    assert moments[-1].activations == 0.0
    assert moments[-1].gradients == priced(layout).memory.gradients
    times = [moment.seconds for moment in moments]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("layout", "moment"),
    [(LAYOUTS[0], "after forward 2 of 2"), (Layout(dp=8), "in backward 1 of 1")],
)
def test_the_highest_point_is_at_the_moment_that_is_named(layout: Layout, moment: str) -> None:
    plan = priced(layout)
    steps = simulated(plan).timeline.of_rank(0)
    highest = max(curve(layout), key=lambda at: at.gradients + at.activations)
    assert peak_moment(layout, plan.memory.rank_stage) == moment
    if moment.startswith("after"):
        assert highest.seconds == [step.end for step in steps if "F" in str(step.item)][1]
    else:
        assert highest.seconds == next(step.start for step in steps if "B" in str(step.item))


def test_a_rank_of_1f1b_has_as_many_microbatches_as_there_are_stages_after_it() -> None:
    model = replace(MODEL, vocab=64)  # so that the last stage is not the fullest
    plans = Plans(
        LayoutSpace(model, cluster(1, 4), STACK, SearchLimits(global_batch=8, fixed=FIXED)),
        "memory",
    )
    plan = plans.best
    assert plan.memory.rank_stage == 0
    levels = {round(moment.activations) for moment in memory_curve(plan, simulated(plan))}
    assert len(levels) == 5  # none to four
