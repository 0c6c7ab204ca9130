"""Lowering: computations stay, transfers are added in an order that cannot stall."""

import pytest

from echelon.errors import ArgumentError, ScheduleError
from echelon.pipeline import Channel, Kind, Schedule, check, lower, schedule, simulate
from echelon.pipeline.schedules.dataflow import Values, ends_of
from echelon.pipeline.schedules.ir import COMPUTE
from echelon.pipeline.schedules.passes import (
    MAX_AHEAD,
    add_reductions,
    add_transfers,
    add_transfers_in_sweeps,
    add_unshards,
)
from tests.pipeline.sizes import VARIANTS, every, make


def computations(found: Schedule) -> tuple:
    return tuple(
        tuple(item for item in order if all(part.kind in COMPUTE for part in item.parts))
        for order in found.orders
    )


@pytest.mark.slow
def test_lowering_keeps_every_computation_and_passes_every_rule() -> None:
    for found in every(range(1, 4), range(1, 8, 5)):
        costs = {"F": 1, "B": 2.2, "hop": 0.1}
        lowered = lower(found, costs)
        assert computations(lowered) == found.orders
        assert lowered.is_lowered == (found.num_ranks > 1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_transfers_cost_hardly_more_than_channels_without_an_order(variant) -> None:
    found = make(variant, 4, 9)
    v = found.num_stages // 4
    costs = {"F": 1 / v, "I": 1 / v, "W": 1 / v, "hop": 0.05}
    ideal = simulate(found, costs).makespan
    queued = simulate(add_transfers(found, costs), costs, channel=Channel.PAIR).makespan
    # Where pairs are fused, two values leave at once, and one of them waits for the other.
    assert queued <= ideal * (1.02 if variant == "dualpipe-v-fused" else 1.005)


@pytest.mark.parametrize("name", ["gpipe", "zb-h1", "zb-h2"])
def test_a_receive_is_posted_at_most_four_computations_before_its_consumer(name) -> None:
    found = add_transfers(schedule(name, 3, 12, 3))
    waits = set()
    for order in found.orders:
        posted: dict[tuple[bool, int | None], int] = {}
        computed = 0
        for kind, i, _ in order:
            if kind in (Kind.RECV_F, Kind.RECV_B):
                posted[kind is Kind.RECV_F, i] = computed
            elif kind in COMPUTE:
                if kind is not Kind.W and (kind is Kind.F, i) in posted:
                    waits.add(computed - posted.pop((kind is Kind.F, i)))
                computed += 1
        assert posted == {}
    assert max(waits) == MAX_AHEAD


def test_the_natural_order_stalls_and_ours_does_not() -> None:
    # Each receive just before its use, each send just after its computation.
    found = schedule("interleaved", 4, 4, 2)
    natural = []
    for order in found.orders:
        row = []
        for kind, i, stage in order:
            forward = kind is Kind.F
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            word = "F" if forward else "B"
            row += [f"{stage}RECV_{word}{i}"] * (0 <= before < 4)
            row += [f"{stage}{kind.value}{i}"]
            row += [f"{stage}SEND_{word}{i}"] * (0 <= after < 4)
        natural.append(row)
    with pytest.raises(ScheduleError):
        check(Schedule.from_orders(natural))
    check(lower(found))


def test_costs_decide_the_order_of_transfers() -> None:
    found = schedule("zb-v", 6, 7, 3)
    slow = {"F": [1, 1, 2, 1, 1, 1], "I": 3, "W": [1, 1, 9, 1, 1, 1], "hop": 1}
    assert add_transfers(found, slow).orders != add_transfers(found).orders


def test_computations_that_cost_nothing_are_lowered_too() -> None:
    for variant in VARIANTS:
        check(lower(make(variant, 2, 5), {"F": 0, "B": 0}))


def test_what_is_lowered_is_not_lowered_again() -> None:
    with pytest.raises(ScheduleError, match="it has transfers already"):
        lower(lower(schedule("1f1b", 2, 2, 2)))


def test_a_list_that_cannot_run_is_not_lowered() -> None:
    with pytest.raises(ScheduleError, match="no rank can go on"):
        lower(Schedule.from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))


def test_a_lowered_schedule_reads_back_from_its_csv() -> None:
    lowered = lower(schedule("zb-v", 6, 7, 3), gather=[1] * 6, window_nbytes=2)
    assert Schedule.from_csv(lowered.to_csv(), "zb-v") == lowered


def test_every_stage_is_reduced_once_right_after_its_last_backward_and_what_that_sends() -> None:
    for found in every(range(3, 4), range(6, 7)):
        if not found.has_backward:
            assert add_reductions(found) == found
            continue
        lowered = add_reductions(add_transfers(found))
        check(lowered)
        for rank, order in enumerate(lowered.orders):
            for stage in lowered.stages_of(rank):
                at = [n for n, a in enumerate(order) if str(a) == f"{stage}REDUCE_GRAD"]
                assert len(at) == 1
                before = order[: at[0]]
                last = max(
                    n
                    for n, item in enumerate(before)
                    for part in item.parts
                    if part.stage == stage and part.kind in (Kind.B, Kind.W)
                )
                between = {item.kind for item in order[last + 1 : at[0]]}
                assert between <= {Kind.SEND_B, Kind.SEND_F, Kind.REDUCE}


def test_a_window_of_bytes_bounds_what_is_gathered() -> None:
    sizes = [5, 3, 8, 2, 9, 1, 4, 6]
    found = schedule("interleaved", 8, 6, 2)
    for window in (9, 12, 16, 100):
        gathered = add_unshards(found, sizes, window)
        check(gathered)
        most = 0
        for order in gathered.orders:
            full: set[int] = set()
            for item in order:
                if item.kind is Kind.UNSHARD:
                    full.add(item.stage)
                elif item.kind is Kind.RESHARD:
                    full.remove(item.stage)
                most = max(most, sum(sizes[stage] for stage in full))
        assert most <= window
    assert str(add_unshards(found, sizes, 100)).count("UNSHARD") == 8
    assert computations(add_unshards(found, sizes, 9)) == found.orders


def test_a_stage_larger_than_the_window_is_gathered_alone() -> None:
    gathered = add_unshards(Schedule.from_csv("0F0,1F0,1B0,0B0"), [10, 1], 2)
    check(gathered)
    assert str(gathered) == (
        "rank 0 | 0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"
    )


def test_breadth_first_gathers_each_stage_once_forward_and_once_backward_but_the_last() -> None:
    found = schedule("looped-bfs", 6, 8, 2)
    gathered = add_unshards(found, [1] * 6, 1)
    assert [sum(a.kind is Kind.UNSHARD for a in order) for order in gathered.orders] == [5, 5]


def test_bytes_of_another_number_of_stages_are_refused() -> None:
    with pytest.raises(ArgumentError, match="one number >= 0 for each of the 2 stages"):
        add_unshards(schedule("1f1b", 2, 2, 2), [1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_transfers_in_sweeps_stand_where_turns_of_one_action_place_them(variant: str) -> None:
    """PyTorch's runtime: again and again each rank in turn runs its next action, if it can."""
    for ranks, microbatches in ((2, 4), (3, 7), (4, 8)):
        drawn = make(variant, ranks, microbatches)
        values, made = Values(drawn.num_stages, microbatches), set()
        heads, swept = [0] * ranks, [list[str]() for _ in range(ranks)]
        while heads != [len(order) for order in drawn.orders]:
            for rank, order in enumerate(drawn.orders):
                parts = order[heads[rank]].parts if heads[rank] < len(order) else ()
                if not parts or any(not made.issuperset(values.needed(part)) for part in parts):
                    continue
                swept[rank].append(str(order[heads[rank]]))
                heads[rank] += 1
                for part in parts:
                    made.add(values.result(part))
                    ends = [] if part.kind is Kind.W else list(ends_of(part))
                    there = [end.stage for end in ends if 0 <= end.stage < drawn.num_stages]
                    owners = [drawn.placement[stage] for stage in there]
                    if len(set(owners)) == 2:
                        for owner, end in zip(owners, ends, strict=True):
                            swept[owner].append(str(end))
        lowered = add_transfers_in_sweeps(drawn)
        assert [[str(item) for item in order] for order in lowered.orders] == swept
