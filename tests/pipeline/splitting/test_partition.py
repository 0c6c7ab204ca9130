"""Cuts are exact: no other cut is better, by comparison with all of them."""

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import echelon as ec
from echelon.errors import ArgumentError
from echelon.pipeline import partition
from echelon.pipeline.splitting.partition import makespan, most_alive, refine

numbers = st.integers(0, 30)


@st.composite
def cases(draw):
    n = draw(st.integers(1, 9))
    stages = draw(st.integers(1, n))

    def row(length: int) -> list[int]:
        return draw(st.lists(numbers, min_size=length, max_size=length))

    return {
        "costs": row(n),
        "stages": stages,
        "nbytes": row(n),
        "activations": row(n),
        "alive": row(stages),
        "cuts": row(n),
    }


def all_cuts(n: int, stages: int):
    for middle in combinations(range(1, n), stages - 1):
        edges = [0, *middle, n]
        yield [range(*pair) for pair in pairwise(edges)]


def judged(case, blocks) -> tuple[int, int, int, int]:
    """The criteria in their order."""
    times = [sum(case["costs"][b] for b in stage) for stage in blocks]
    kept = [
        sum(case["nbytes"][b] + case["alive"][j] * case["activations"][b] for b in stage)
        for j, stage in enumerate(blocks)
    ]
    crossing = sum(case["cuts"][stage[-1]] for stage in blocks[:-1])
    return max(times), max(kept), crossing, sum(time**2 for time in times)


@settings(max_examples=80)
@given(cases())
def test_no_cut_is_better(case) -> None:
    found = partition(**case)
    assert [b for stage in found for b in stage] == list(range(len(case["costs"])))
    assert len(found) == case["stages"]
    assert all(found)
    options = all_cuts(len(case["costs"]), case["stages"])
    assert judged(case, found) == min(judged(case, blocks) for blocks in options)


@pytest.mark.slow
@settings(max_examples=80)
@given(cases(), st.integers(0, 400))
def test_under_a_cap_no_cut_within_it_is_better(case, cap) -> None:
    options = [judged(case, blocks) for blocks in all_cuts(len(case["costs"]), case["stages"])]
    within = [option for option in options if option[1] <= cap]
    if within:
        assert judged(case, partition(**case, cap=cap)) == min(within)
    else:
        least = min(kept for _, kept, _, _ in options)
        with pytest.raises(ArgumentError, match=f"the least cap that works is {least}: raise it"):
            partition(**case, cap=cap)


def test_blocks_alike_are_spread_evenly() -> None:
    assert [len(stage) for stage in partition([1] * 8, 3)] in ([3, 3, 2], [3, 2, 3], [2, 3, 3])


def test_a_model_of_many_blocks_is_cut_at_once() -> None:
    # An embedding and a head around 94 blocks; a stage with 6.5 or less cannot take 98 in 15.
    costs = [1.5, *[1.0] * 94, 2.5]
    found = partition(costs, 15)
    assert max(sum(costs[b] for b in stage) for stage in found) == 7


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (([1, 1], 3), "2 blocks cannot be cut into 3 stages: use at least 1 and at most 2"),
        (([1, 1], 0), "cannot be cut into 0 stages"),
        (([], 1), "0 blocks cannot be cut into 1 stages"),
        (([1, -1], 1), r"costs\[1\] is -1; it must be a number of at least 0"),
        (([1, float("nan")], 1), r"costs\[1\] is nan"),
    ],
)
def test_a_cut_that_does_not_exist_is_refused(arguments, sentence) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        partition(*arguments)


def test_a_list_of_another_length_is_refused() -> None:
    with pytest.raises(ArgumentError, match="nbytes has 1 numbers; give 2"):
        partition([1, 1], 2, nbytes=[1])
    with pytest.raises(ArgumentError, match="alive has 2 numbers; give 1"):
        partition([1, 1], 1, alive=[1, 1])


# --- refined by the simulation of the schedule that will run ------------------------------------


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
