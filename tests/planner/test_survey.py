"""A look at every layout: the smallest, the front of time and memory, and what does not fit."""

import pytest

from echelon.planner.layout import Layout
from echelon.planner.layout_space import LayoutSpace, SearchLimits
from echelon.planner.plan_search import priced
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.simulated_step import simulated_time
from echelon.planner.step_time import LayoutTimer
from echelon.planner.survey import Front, pareto_of, survey
from tests.planner.sizes import MODEL, STACK, cluster, layouts

LIMIT = 1.5e9
SPACE = LayoutSpace(
    MODEL, cluster(2, 4), STACK, SearchLimits(global_batch=16, keep=5, max_memory=LIMIT)
)


def everything() -> list[PricedPlan]:
    timer = LayoutTimer(MODEL, SPACE.cluster, STACK)
    return [
        priced(SPACE, layout, simulated_time(timer, layout, timer.step_time(layout)))
        for layout in layouts(MODEL, SPACE.cluster, SPACE.limits)
    ]


@pytest.mark.slow
def test_the_smallest_have_the_least_memory_of_all_that_fit() -> None:
    sizes = sorted(plan.memory.total for plan in everything() if plan.memory.total <= plan.limit)
    assert [plan.memory.total for plan in survey(SPACE).smallest] == sizes[:5]


def test_no_plan_is_both_faster_and_smaller_than_one_of_the_front() -> None:
    fitting = [
        (plan.time.total, plan.memory.total)
        for plan in everything()
        if plan.memory.total <= plan.limit
    ]
    front = [(plan.time.total, plan.memory.total) for plan in survey(SPACE).pareto]
    assert len(front) > 2
    assert front == sorted(front)
    for seconds, nbytes in front:
        assert not any(time < seconds and size < nbytes for time, size in fitting)
    for seconds, nbytes in fitting:
        assert any(time <= seconds and size <= nbytes for time, size in front)


@pytest.mark.slow
def test_of_axes_of_which_nothing_fits_the_nearest_is_refused() -> None:
    def kind(plan: object) -> tuple[int, ...]:
        layout = plan.layout  # type: ignore[attr-defined]
        axes = (layout.tp, layout.cp, layout.ep, layout.pp, layout.shard)
        return (*axes, layout.sharded.value)

    refused = survey(SPACE).refused
    fitting = {kind(plan) for plan in everything() if plan.memory.total <= plan.limit}
    others = [plan for plan in everything() if kind(plan) not in fitting]
    assert {kind(plan) for plan in refused} == {kind(plan) for plan in others}
    assert len(refused) > 3
    for plan in refused:
        same = [other.memory.total for other in others if kind(other) == kind(plan)]
        assert LIMIT < plan.nbytes == min(same)
    assert [plan.nbytes for plan in refused] == sorted(plan.nbytes for plan in refused)


def test_without_plans_there_is_no_front() -> None:
    assert pareto_of([]) == []


def test_a_front_keeps_what_no_point_beats_in_any_order() -> None:
    points = [(float(i * 7 % 11), float(i * 5 % 13)) for i in range(60)]
    front = Front()
    for seconds, nbytes in points:
        beaten = front.is_beaten(seconds, nbytes)
        known = [(time, size) for time, size, _ in front.points]
        assert beaten == any(time <= seconds and size <= nbytes for time, size in known)
        front.add(seconds, nbytes, Layout())
    left = [(time, size) for time, size, _ in front.points]
    best = {
        point
        for point in points
        if not any(
            other != point and other[0] <= point[0] and other[1] <= point[1] for other in points
        )
    }
    assert left == sorted(best)
