"""Schedules that cannot run are named with rank, index and action."""

from typing import Any

import pytest
from torch import nn

import echelon as ec
from echelon.errors import ArgumentError, ScheduleError
from echelon.pipeline import Schedule, check, schedule
from echelon.pipeline.schedules.check import memory

TWO_RANKS = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"
LOWERED = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"


def failure(csv: str) -> ScheduleError:
    with pytest.raises(ScheduleError) as info:
        check(Schedule.from_csv(csv))
    return info.value


def test_schedules_that_can_run_pass() -> None:
    check(Schedule.from_csv(TWO_RANKS))
    check(Schedule.from_csv(LOWERED))
    check(Schedule.from_csv("0F0,1F0,1B0,0I0,0W0"))
    check(Schedule.from_csv("0F0,0F1\n1F0,1F1"))


@pytest.mark.parametrize(
    ("csv", "rank", "index", "action", "sentence"),
    [
        # an action that is missing or too much
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", 0, None, "0B1", "it is missing"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0,1B1", 1, None, "1F1", "it is missing"),
        ("0F0,0I0\n1F0,1B0", 0, None, "0W0", "it is missing"),
        ("0F0,0F0,0B0", 0, 1, "0F0", "it is at index 0 already"),
        ("0F0,0B0,0W0", 0, 2, "0W0", "the whole backward 0B0 is there too"),
        ("0F0,0I0,0B0,0W0", 0, 1, "0I0", "the whole backward 0B0 is there too"),
        # an order that breaks what an action needs on its own rank
        ("0F0,0B0\n1B0,1F0", 1, 0, "1B0", "it stands before 1F0, which is at index 1"),
        ("0F0,0W0,0I0", 0, 1, "0W0", "it stands before 0I0, which is at index 2"),
        # transfers
        ("0F0,0B0\n1RECV_F0,1F0,1B0", 0, 1, "0B0", "no receive of 1B0 stands before it"),
        ("0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", 0, None, None, "0F0 gives is received"),
        ("0SEND_F0,0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0", 0, 0, "0SEND_F0", "before 0F0"),
        (LOWERED.replace("0SEND_F0", "0SEND_F0,0SEND_F0"), 0, 2, "0SEND_F0", "it is there twice"),
        ("0F0,0SEND_F0,1F0,1B0,0B0\n2F0,2B0", 0, 1, "0SEND_F0", "both of its stages are on rank 0"),
        ("0F0,0SEND_B0,0B0\n1RECV_F0,1F0,1B0", 0, 1, "0SEND_B0", "has no neighbour"),
        # gathers and reductions
        ("0UNSHARD,0F0,0RESHARD,0B0", 0, 3, "0B0", "0UNSHARD must stand before it"),
        ("0UNSHARD,0F0,0UNSHARD,0B0", 0, 2, "0UNSHARD", "is unsharded already"),
        ("0RESHARD,0UNSHARD,0F0,0B0", 0, 0, "0RESHARD", "is not unsharded"),
        ("0UNSHARD,0F0,0B0", 0, None, "0RESHARD", "it is missing: the stage stays unsharded"),
        ("0F0,0I0,0REDUCE_GRAD,0W0", 0, 3, "0W0", "stage 0 is reduced already, at index 2"),
        ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD", 0, 3, "0REDUCE_GRAD", "is reduced already"),
        ("0F0,0B0,0REDUCE_GRAD\n1F0,1B0", 1, None, "1REDUCE_GRAD", "it is missing"),
    ],
)
def test_a_broken_rule_is_named_with_rank_index_and_action(
    csv, rank, index, action, sentence
) -> None:
    error = failure(csv)
    assert sentence in str(error)
    assert (error.rank, error.index, error.action) == (rank, index, action)


def test_a_stage_on_a_rank_that_does_not_hold_it_is_named() -> None:
    two = Schedule.from_csv(TWO_RANKS)
    moved = Schedule(
        name="moved", num_stages=2, num_microbatches=2, placement=(1, 0), orders=two.orders
    )
    with pytest.raises(ScheduleError, match=r"rank 0, index 0 \(0F0\): stage 0 is on rank 1"):
        check(moved)


def test_a_deadlock_of_computations_draws_its_circle() -> None:
    # Rank 0 wants the backward of microbatch 1 first, rank 1 gives that of 0 first and waits for
    # the forward of 1, which stands behind.
    error = failure("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1")
    assert str(error) == (
        "the schedule cannot run: no rank can go on:\n"
        "  rank 0, index 1: 0B0 waits for 1B0 of rank 1, index 2\n"
        "  rank 1, index 1: 1F1 waits for 0F1 of rank 0, index 2"
    )


def test_a_circle_over_three_ranks_leaves_out_who_only_waits_for_it() -> None:
    error = failure("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n2F0,2F1,2B0,2B1")
    assert "rank 0" not in str(error)
    assert "rank 1, index 1: 1B0 waits for 2B0 of rank 2, index 2" in str(error)
    assert "rank 2, index 1: 2F1 waits for 1F1 of rank 1, index 2" in str(error)


def test_two_sends_that_hold_each_other_are_a_deadlock() -> None:
    # Each rank sends before it has posted the receive that the other one's send needs.
    error = failure(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
        "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1"
    )
    assert "its transfer comes in another order on rank 1, which has 1SEND_B0" in str(error)


def test_sends_that_wait_round_three_ranks_are_a_deadlock_though_every_pair_agrees() -> None:
    # Stages 0 to 5 in a loop over three ranks: each rank sends to the next before it has posted
    # the receive that the one before it waits for, all the way round.
    def step(stage: int, i: int) -> list[str]:
        receive, send = [f"{stage}RECV_F{i}"] * (stage > 0), [f"{stage}SEND_F{i}"] * (stage < 5)
        return [*receive, f"{stage}F{i}", *send]

    orders = [
        [action for stage in (r, r + 3) for i in range(3) for action in step(stage, i)]
        for r in range(3)
    ]
    with pytest.raises(ScheduleError, match="no rank can go on") as info:
        check(Schedule.from_orders(orders))
    assert str(info.value).splitlines()[1:] == [
        "  rank 0, index 5: 0SEND_F2 waits for the transfer of 0F2 with rank 1",
        "  rank 1, index 5: 1SEND_F1 waits for the transfer of 1F1 with rank 2",
        "  rank 2, index 2: 2SEND_F0 waits for the transfer of 2F0 with rank 0",
    ]
    early = [f"3RECV_F{i}" for i in range(3)]
    orders[0] = early + [action for action in orders[0] if action not in early]
    check(Schedule.from_orders(orders))


def test_memory_is_replayed_against_a_cap() -> None:
    found = schedule("1f1b", 4, 8, 4)
    memory(found, [4, 3, 2, 1])
    check(found, memory_cap=4)
    with pytest.raises(ScheduleError, match="with it 1 microbatches are alive") as info:
        memory(found, [4, 3, 2, 0.5])
    assert (info.value.rank, info.value.index, info.value.action) == (3, 0, "3F0")
    with pytest.raises(ScheduleError, match="more than the cap of 3") as info:
        check(found, memory_cap=3)
    assert (info.value.rank, info.value.action) == (0, "0F3")
    with pytest.raises(ArgumentError, match="memory_cap has 2 numbers; give 4"):
        memory(found, [1, 2])


def test_memory_counts_a_chunk_as_its_part_of_a_rank() -> None:
    found = schedule("interleaved", 8, 8, 4)
    memory(found, [5.5, 4.5, 3.5, 2.5])
    with pytest.raises(ScheduleError, match=r"5\.5 microbatches are alive on its rank"):
        memory(found, 5)


LINE = ec.pipeline.schedule("1f1b", 2, 4, 2)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ec.pipeline.check("1f1b"), "schedule is '1f1b'; give a Schedule"),
        (lambda: ec.pipeline.simulate(None), "schedule is None; give a Schedule"),
        (lambda: ec.pipeline.lower([]), r"schedule is \[\]; give a Schedule"),
        (
            lambda: ec.pipeline.split(nn.Sequential(nn.Linear(1, 1)), 1, schedule="1f1b"),
            "schedule is '1f1b'; give a Schedule",
        ),
        (lambda: ec.pipeline.simulate(LINE, 3), "costs is 3; give numbers by name"),
        (lambda: ec.pipeline.choose(2, 4, chunks=0), "chunks is 0; give numbers of stages"),
        (lambda: ec.pipeline.choose(2, 4, chunks=["x"]), r"chunks is \['x'\]; give numbers"),
        (lambda: ec.pipeline.choose(2, 4, memory_cap=-1), "memory_cap is -1"),
        (lambda: ec.pipeline.Schedule.from_csv(3), "text is 3; give the CSV itself"),
    ],
)
def test_what_is_no_schedule_cost_or_number_is_said_so(call: Any, sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        call()
