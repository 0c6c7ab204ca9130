"""Orders that nobody designed: those that can run are lowered and timed, the others are named."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ScheduleError
from echelon.pipeline import Action, Channel, Kind, Schedule, check, lower, schedule, simulate
from echelon.pipeline.schedules.dataflow import Values
from echelon.pipeline.schedules.walk import walk


def random_schedule(seed: int) -> Schedule:
    """Stages on any ranks, backwards whole or split, and of all that can run any one next."""
    draw = random.Random(seed)
    ranks, stages, m = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 5)
    placement = [draw.randrange(ranks) for _ in range(stages)]
    todo = []
    for stage in range(stages):
        for i in range(m):
            kinds = draw.choice([(Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W)])
            todo += [Action(kind=kind, microbatch=i, stage=stage) for kind in kinds]
    values, there = Values(stages, m), set()
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while todo:
        ready = [action for action in todo if there.issuperset(values.needed(action))]
        action = draw.choice(ready)
        todo.remove(action)
        orders[placement[action.stage]].append(action)
        given = values.result(action)
        there |= set() if given is None else {given}
    return Schedule.from_orders(orders, "random")


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_any_order_that_can_run_is_checked_lowered_and_timed(seed) -> None:
    drawn = random_schedule(seed)
    check(drawn)
    costs = {"F": 1, "B": 2, "hop": 0.25}
    lowered = lower(drawn, costs)
    least = simulate(drawn, costs).makespan
    for channel in Channel:
        if channel is not Channel.RANK:  # a queue per rank is stricter than what lowering promises
            assert simulate(lowered, costs, channel=channel).makespan >= least - 1e-9


@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_two_actions_that_change_places_either_run_or_are_named(seed) -> None:
    drawn, draw = random_schedule(seed), random.Random(seed + 1)
    orders = [list(order) for order in drawn.orders]
    order = draw.choice([order for order in orders if order])
    a, b = draw.randrange(len(order)), draw.randrange(len(order))
    order[a], order[b] = order[b], order[a]
    swapped = Schedule.from_orders(orders, "swapped")
    # What the dependencies alone say, by brute force.
    values, there, heads = (
        Values(swapped.num_stages, swapped.num_microbatches),
        set(),
        [0] * len(orders),
    )
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while heads[rank] < len(order) and there.issuperset(values.needed(order[heads[rank]])):
                there.add(values.result(order[heads[rank]]))
                heads[rank] += 1
                moved = True
    if heads == [len(order) for order in orders]:
        check(swapped)
    else:
        with pytest.raises(ScheduleError, match=r"it stands before|no rank can go on"):
            check(swapped)


@settings(max_examples=30)
@given(st.integers(0, 10**9))
def test_an_action_that_is_left_out_is_named(seed) -> None:
    drawn, draw = random_schedule(seed), random.Random(seed + 1)
    orders = [list(order) for order in drawn.orders]
    gone = draw.choice([action for order in orders for action in order])
    left = tuple(tuple(a for a in order if a != gone) for order in orders)
    rest = Schedule(
        name="left out",
        num_stages=drawn.num_stages,
        num_microbatches=drawn.num_microbatches,
        placement=drawn.placement,
        orders=left,
    )
    if any(a.kind in (Kind.B, Kind.I, Kind.W) for order in left for a in order):
        with pytest.raises(ScheduleError, match="it is missing") as info:
            check(rest)
        assert info.value.action == str(gone)
        assert info.value.rank == drawn.placement[gone.stage]


def test_transfers_in_one_queue_take_longer_than_in_their_own() -> None:
    # Two values at the same time between two ranks: the second waits for the first.
    lowered = Schedule.from_csv(
        "0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1",
    )
    costs = {"F": [0, 1], "hop": 2}
    assert simulate(lowered, costs).timeline.steps[-1].end == 4
    assert simulate(lowered, costs, channel=Channel.PAIR).timeline.steps[-1].end == 5
    assert simulate(lowered, costs, channel=Channel.RANK).timeline.steps[-1].end == 5


def test_a_walk_comes_to_every_item_once() -> None:
    lowered = lower(schedule("dualpipe-v", 6, 8, 3, fused=True))
    seen = sorted((rank, position) for rank, position, _, _ in walk(lowered))
    assert seen == [(r, n) for r, order in enumerate(lowered.orders) for n in range(len(order))]
