import random
from itertools import pairwise

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.families import schedule
from echelon.pipeline.schedules.simulate import simulate
from echelon.planner.layout import Layout
from echelon.planner.stage_schedule import (
    bubble_of_a_stage,
    least_bubble,
    microbatches_under_way,
    schedule_choices,
)

SIZES = [(pp, pp * rounds) for pp in (2, 3, 4, 5, 8) for rounds in (1, 2, 5)]


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
    if layout.has_closed_form:
        bubble = (layout.pp - 1) * bubble_of_a_stage(layout, forward, inputs, weights)
        busy = layout.microbatches * sum(seconds)
        assert simulation.makespan == pytest.approx(busy + bubble)
    under_way = [microbatches_under_way(layout, rank) / layout.chunks for rank in range(layout.pp)]
    assert under_way == list(simulation.peak)


def test_the_first_rank_of_1f1b_keeps_as_many_microbatches_as_there_are_ranks() -> None:
    layout = Layout(pp=4, microbatches=16)
    assert [microbatches_under_way(layout, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert microbatches_under_way(Layout(pp=4, microbatches=2), 0) == 2


def test_a_schedule_without_a_closed_form_has_none() -> None:
    layout = Layout(pp=2, microbatches=4, chunks=2, schedule="v-half")
    with pytest.raises(ArgumentError, match="'v-half' has no closed form: simulate it"):
        bubble_of_a_stage(layout, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("seed", range(40))
def test_no_schedule_on_a_v_has_a_smaller_bubble_than_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    pp, rounds = draw.choice([2, 3, 4, 5, 7]), draw.choice([1, 2, 3])
    for name, chunks in schedule_choices(pp, layers=64, microbatches=rounds * pp):
        layout = Layout(pp=pp, microbatches=rounds * pp, schedule=name, chunks=chunks)
        if not layout.schedule_cost.is_v:
            continue
        lengths = [draw.choice([1.0, 1.0, 2.0]) * draw.uniform(0.9, 1.1) for _ in range(2 * pp)]
        parts = {"F": 1.0, "I": draw.choice([1.0, 2.0]), "W": draw.choice([0.3, 1.0])}
        costs = {kind: [part * length for length in lengths] for kind, part in parts.items()}
        costs["F"][-1] += draw.choice([0.0, 3.0])
        actions = schedule(layout.schedule_name, 2 * pp, layout.microbatches, pp)
        simulation = simulate(actions, costs)
        least = least_bubble(layout, costs, simulation.busy)
        assert 0 <= least <= simulation.makespan - max(simulation.busy) + 1e-9


@pytest.mark.parametrize("layout", layouts(), ids=str)
def test_no_rank_after_the_second_keeps_more_microbatches_than_the_one_before_it(
    layout: Layout,
) -> None:
    first = 1 if layout.schedule_name == "v-min" else 0
    under_way = [microbatches_under_way(layout, rank) for rank in range(first, layout.pp)]
    assert all(before >= after for before, after in pairwise(under_way))


def test_a_pipeline_needs_as_many_microbatches_as_ranks_and_blocks_for_all_stages() -> None:
    assert schedule_choices(pp=4, layers=64, microbatches=3) == []
    assert schedule_choices(pp=4, layers=4, microbatches=4) == [(None, 1), ("zb-h1", 1)]
    assert schedule_choices(pp=1, layers=4, microbatches=1) == [(None, 1)]
