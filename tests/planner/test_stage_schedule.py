from itertools import pairwise

import pytest

from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.simulate import simulate
from echelon.planner.layout import Layout
from echelon.planner.stage_schedule import (
    bubble_of_a_stage,
    microbatches_under_way,
    schedule_choices,
)

SIZES = [(pp, pp * rounds) for pp in (2, 4, 6) for rounds in (1, 2, 5)]


def layouts() -> list[Layout]:
    return [
        Layout(pp=pp, microbatches=microbatches, schedule=name, chunks=chunks)
        for pp, microbatches in SIZES
        for name, chunks in schedule_choices(pp, layers=64, microbatches=microbatches)
    ]


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (1.0, 2.4, 0.6)], ids=str)
def test_the_closed_forms_are_those_of_the_action_lists(
    layout: Layout, seconds: tuple[float, float, float]
) -> None:
    forward, inputs, weights = seconds
    costs = {name: part / layout.chunks for name, part in zip("FIW", seconds, strict=True)}
    stages = layout.pp * layout.chunks
    actions = schedule(layout.schedule_name, stages, layout.microbatches, layout.pp)
    simulation = simulate(actions, costs)
    bubble = (layout.pp - 1) * bubble_of_a_stage(layout, forward, inputs, weights)
    busy = layout.microbatches * sum(seconds)
    assert simulation.makespan == pytest.approx(busy + bubble)
    under_way = [microbatches_under_way(layout, rank) / layout.chunks for rank in range(layout.pp)]
    assert under_way == list(simulation.peak)


def test_the_first_rank_of_1f1b_keeps_as_many_microbatches_as_there_are_ranks() -> None:
    layout = Layout(pp=4, microbatches=16)
    assert [microbatches_under_way(layout, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert microbatches_under_way(Layout(pp=4, microbatches=2), 0) == 2


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_no_rank_keeps_more_microbatches_than_the_one_before_it(layout: Layout) -> None:
    under_way = [microbatches_under_way(layout, rank) for rank in range(layout.pp)]
    assert all(before >= after for before, after in pairwise(under_way))


def test_a_pipeline_needs_as_many_microbatches_as_ranks_and_blocks_for_all_stages() -> None:
    assert schedule_choices(pp=4, layers=64, microbatches=3) == []
    assert schedule_choices(pp=4, layers=4, microbatches=4) == [(None, 1), ("zb-h1", 1)]
    assert schedule_choices(pp=1, layers=4, microbatches=1) == [(None, 1)]
