from echelon.planner.layout_space import SearchLimits, families
from echelon.planner.layout_timer import LayoutTimer
from echelon.planner.step_time import step_time
from tests.planner.sizes import MODEL, STACK, cluster


def test_layouts_are_timed_as_each_is_alone() -> None:
    place = cluster(2, 4)
    timer = LayoutTimer(MODEL, place, STACK)
    for family in families(MODEL, place, SearchLimits(global_batch=8)):
        for layout in family.layouts():
            assert timer.step_time(layout) == step_time(MODEL, layout, place, STACK)
