import random
from collections.abc import Callable

import pytest

from echelon.diagnosis.held_up import HeldUp, verdict
from echelon.diagnosis.step_rows import Activity, RankSteps, StepRows

MS = 1_000_000
FORWARD, BACKWARD, LOADING = Activity.FORWARD, Activity.BACKWARD, Activity.LOADING
WAITING, SAVING = Activity.COMMUNICATION, Activity.SAVING
NO_PROCESSOR = Activity.PROCESSOR

Spans = dict[Activity, float]
Step = Callable[[int], Spans]  # what a rank does in a step, in ms


def ranks_of(
    *ranks: Step, num_steps: int = 20, is_stage: bool = False, slept: Spans | None = None
) -> list[RankSteps]:
    """Ranks of which each is as long in a step as the slowest: they wait for it at the end.

    Args:
        slept: of rank 1 in each step: how long it was blocked.
    """
    tables = [StepRows.private() for _ in ranks]
    for number in range(num_steps):
        spans = [step(number) for step in ranks]
        wall = max(sum(rank_spans.values()) for rank_spans in spans)
        for rank, rank_spans in enumerate(spans):
            waited = wall - sum(rank_spans.values())
            row = [round(MS * rank_spans.get(activity, 0)) for activity in Activity]
            blocked = [0] * len(Activity)
            for activity, ms in (slept or {}).items():
                blocked[activity] = round(MS * ms) if rank == 1 else 0
            row[WAITING] += round(MS * waited)
            tables[rank].add([round(MS * wall), *row, *blocked, 0, 0])
    if is_stage:
        for table in tables:
            table.call_stage()
    return [RankSteps.of(rank, table.numbers()) for rank, table in enumerate(tables)]


def usual(number: int) -> Spans:
    return {FORWARD: 30, BACKWARD: 60}


def with_extra(activity: Activity, ms: float, *, every: int = 1) -> Step:
    def step(number: int) -> Spans:
        spans = usual(number)
        spans[activity] = spans.get(activity, 0) + (ms if number % every == 0 else 0)
        return spans

    return step


def named(costs: list[HeldUp]) -> list[tuple[int, Activity, int]]:
    return [(cost.rank, cost.activity, round(1e3 * cost.seconds)) for cost in costs]


def test_a_slow_rank_is_named_with_its_cost_and_its_activity() -> None:
    (cost,) = verdict(ranks_of(usual, with_extra(BACKWARD, 54)))
    assert str(cost) == "rank 1 cost 54 ms a step, in backward (a step took 144 ms)"


def test_two_ranks_are_named_also_where_the_slower_one_hides_the_other() -> None:
    ranks = ranks_of(usual, with_extra(BACKWARD, 200), with_extra(LOADING, 150))
    assert named(verdict(ranks)) == [(1, BACKWARD, 200), (2, LOADING, 150)]


def test_a_rank_costs_no_more_than_others_wait() -> None:
    ranks = ranks_of(with_extra(LOADING, 150), with_extra(BACKWARD, 200))
    assert named(verdict(ranks)) == [(1, BACKWARD, 50)]


def test_ranks_that_are_equally_slow_are_not_named() -> None:
    slow = with_extra(LOADING, 100)
    assert verdict(ranks_of(slow, slow, slow)) == []


def test_nothing_is_said_about_few_steps_or_one_rank() -> None:
    assert verdict(ranks_of(usual, with_extra(BACKWARD, 54), num_steps=4)) == []
    assert len(verdict(ranks_of(usual, with_extra(BACKWARD, 54), num_steps=5))) == 1
    assert verdict(ranks_of(with_extra(BACKWARD, 54))) == []
    assert verdict([]) == []


def test_the_first_step_does_not_count() -> None:
    def slow_at_first(number: int) -> Spans:
        return usual(number) | ({BACKWARD: 5000} if number == 0 else {})

    assert verdict(ranks_of(usual, slow_at_first, num_steps=6)) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_gives_no_verdict(seed: int) -> None:
    draw = random.Random(seed)

    def noisy(number: int) -> Spans:
        delay = draw.expovariate(1 / 40) if draw.random() < 0.2 else 0  # now and then, and long
        return {FORWARD: 30 * draw.uniform(0.8, 1.2), BACKWARD: 60 * draw.uniform(0.8, 1.2) + delay}

    assert verdict(ranks_of(noisy, noisy, noisy, num_steps=30)) == []


def without_processor(ms: float, spans: Spans) -> Step:
    return lambda number: spans | {NO_PROCESSOR: ms}


def test_what_a_busy_machine_explains_is_no_cost() -> None:
    slower = {FORWARD: 30, BACKWARD: 100}
    assert named(verdict(ranks_of(usual, without_processor(10, slower)))) == [(1, BACKWARD, 40)]
    assert verdict(ranks_of(usual, without_processor(30, slower))) == []


def test_what_a_busy_machine_cannot_explain_is_a_cost_there_too() -> None:
    far_slower = without_processor(300, {FORWARD: 30, BACKWARD: 260})
    assert named(verdict(ranks_of(usual, far_slower))) == [(1, BACKWARD, 200)]
    asleep = without_processor(300, {FORWARD: 30, BACKWARD: 100})
    ranks = ranks_of(usual, asleep, slept={BACKWARD: 40})
    assert named(verdict(ranks)) == [(1, BACKWARD, 40)]
    loads = without_processor(300, {FORWARD: 30, BACKWARD: 60, LOADING: 150})
    assert named(verdict(ranks_of(usual, loads))) == [(1, LOADING, 150)]


def test_saves_that_a_busy_machine_explains_are_no_cost() -> None:
    def save(ms: float, waited_ms: float) -> Step:
        return lambda number: (
            usual(number) | ({SAVING: ms, NO_PROCESSOR: waited_ms} if number % 5 == 0 else {})
        )

    assert verdict(ranks_of(save(500, 0), save(900, 800), num_steps=101)) == []
    assert len(verdict(ranks_of(save(500, 0), save(900, 20), num_steps=101))) == 1


def test_a_little_and_steady_is_not_enough() -> None:
    assert verdict(ranks_of(usual, with_extra(BACKWARD, 4))) == []
    assert len(verdict(ranks_of(usual, with_extra(BACKWARD, 6)))) == 1


def test_saves_of_one_rank_in_some_steps_are_averaged_over_all() -> None:
    (cost,) = verdict(ranks_of(usual, with_extra(SAVING, 500, every=5), num_steps=101))
    assert (cost.rank, cost.activity) == (1, SAVING)
    assert cost.seconds == pytest.approx(0.1, rel=0.05)
    assert verdict(ranks_of(usual, with_extra(SAVING, 500, every=60), num_steps=101)) == []


def test_stages_that_differ_by_design_are_not_named() -> None:
    def heavier(number: int) -> Spans:
        return {FORWARD: 60, BACKWARD: 120, Activity.OPTIMIZER: 50}

    assert verdict(ranks_of(usual, heavier, is_stage=True)) == []
    assert len(verdict(ranks_of(usual, heavier))) == 3


@pytest.mark.parametrize("activity", [FORWARD, BACKWARD, Activity.OPTIMIZER])
def test_a_stage_that_sleeps_is_named(activity: Activity) -> None:
    sleepy = ranks_of(usual, with_extra(activity, 54), usual, is_stage=True, slept={activity: 54})
    assert named(verdict(sleepy)) == [(1, activity, 54)]


def test_a_stage_whose_backward_is_out_of_proportion_is_named() -> None:
    costs = verdict(ranks_of(usual, with_extra(BACKWARD, 200), usual, is_stage=True))
    assert named(costs) == [(1, BACKWARD, 200)]


def test_page_faults_are_named_where_they_explain_the_cost() -> None:
    ranks = ranks_of(usual, with_extra(BACKWARD, 50))
    tables = [StepRows.private() for _ in ranks]
    for steps, table in zip(ranks, tables, strict=True):
        for step in steps.steps.values():
            faults = 100_000 if steps.rank else 1_000
            table.add([step.wall_ns, *step.spans_ns, *step.blocked_ns, faults, 0])
    (cost,) = verdict([RankSteps.of(rank, table.numbers()) for rank, table in enumerate(tables)])
    assert str(cost) == (
        "rank 1 cost 50 ms a step, in backward, with 99,000 page faults more than others "
        "(a step took 140 ms)"
    )
