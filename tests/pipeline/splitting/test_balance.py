"""Cuts are refined by the simulation of the schedule that will run."""

import random

import echelon as ec
from echelon.pipeline.splitting.partition import makespan, most_alive, refine


def test_alive_microbatches_are_counted_by_stage_where_a_rank_has_two() -> None:
    schedule = ec.pipeline.schedule("zb-v", 4, 8, 2)
    alive = most_alive(schedule)
    for rank, peak in enumerate(ec.pipeline.simulate(schedule).peak):
        of_rank = [alive[stage] for stage in schedule.stages_of(rank)]
        # Stages of a rank reach their peaks at different times.
        assert max(of_rank) <= 2 * peak <= sum(of_rank)


def test_a_refined_cut_ends_no_later_and_no_single_move_helps_it() -> None:
    draw = random.Random(0)
    gained = 0
    for _ in range(12):
        costs = [draw.uniform(1, 3) for _ in range(9)]
        schedule = ec.pipeline.schedule("1f1b", 3, 4, 3)
        cut = ec.pipeline.partition(costs, 3)
        better = refine(cut, costs, schedule, lambda _: True)
        best = makespan(schedule, better, costs)
        gained += best < makespan(schedule, cut, costs)
        assert [i for blocks in better for i in blocks] == list(range(9))
        (_, a, b) = (blocks.start for blocks in better)
        for x, y in [(a - 1, b), (a + 1, b), (a, b - 1), (a, b + 1)]:
            if 0 < x < y < 9:
                other = (range(x), range(x, y), range(y, 9))
                assert makespan(schedule, other, costs) >= best * (1 - 1e-9)
    assert gained  # else nothing was refined at all


def test_a_move_that_does_not_fit_is_not_made() -> None:
    schedule = ec.pipeline.schedule("gpipe", 2, 4, 2)
    cut = (range(1), range(1, 4))
    assert refine(cut, [1, 1, 1, 1], schedule, lambda other: len(other[0]) == 1) == cut
