"""Who waits for whom in a circle, beside a brute force that tries the steps."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.errors import ScheduleError
from echelon.pipeline import Schedule, WaitCause, WaitRule, check
from echelon.pipeline.schedules.action_lists import mistake, read
from echelon.pipeline.schedules.ir import TRANSFER
from echelon.pipeline.schedules.passes import add_transfers_in_sweeps
from echelon.pipeline.schedules.waits import crossed_messages, find_circle
from tests.pipeline.schedules.brute_force import outcome, outcomes, parse

RULES = list(WaitRule)


def assert_closed(lists, circle) -> None:
    """Each wait of a circle stands in the lists and leads to the next one."""
    for wait, following in pairwise([*circle, circle[0]]):
        assert lists.orders[wait.rank][wait.position] == wait.action
        assert lists.orders[wait.for_rank][wait.for_position] == wait.for_action
        if wait.cause is WaitCause.REACH:
            assert wait.for_rank != wait.rank
            assert following.rank == wait.for_rank
            assert following.position <= wait.for_position
        else:
            assert wait.for_rank == wait.rank
            assert wait.for_action.kind in TRANSFER
            assert wait.for_position < wait.position


def valid_rows(draw: random.Random, ranks: int, stages: int, microbatches: int) -> list[list[str]]:
    """Lists with transfers that run: a random order of computations, placed on random ranks."""
    homes = [draw.randrange(ranks) for _ in range(stages)]
    split = [draw.random() < 0.3 for _ in range(stages)]
    trains = draw.random() < 0.8
    rows: list[list[str]] = [[] for _ in range(ranks)]
    waiting = {("F", 0, i) for i in range(microbatches)}
    while waiting:
        kind, stage, i = draw.choice(sorted(waiting))
        waiting.remove((kind, stage, i))
        rows[homes[stage]].append(f"{stage}{kind}{i}")
        back = [("I" if split[s] else "B", s, i) for s in (stage - 1, stage)]
        if kind == "F":
            if stage + 1 < stages:
                waiting.add(("F", stage + 1, i))
            elif trains:
                waiting.add(back[1])
        elif kind != "W":
            waiting |= {("W", stage, i)} if kind == "I" else set()
            waiting |= {back[0]} if stage else set()
    used = [row for row in rows if row]
    lowered = add_transfers_in_sweeps(Schedule.from_orders(used))
    return [[str(item) for item in order] for order in lowered.orders]


def is_transfer(text: str) -> bool:
    return "SEND" in text or "RECV" in text


def shuffle(draw: random.Random, rows: list[list[str]], moves: int, anything: bool) -> None:
    """Move some sends and receives, or some actions of any kind, to places nearby."""
    for _ in range(moves):
        row = draw.choice(rows)
        at = draw.randrange(len(row))
        if anything or is_transfer(row[at]):
            text = row.pop(at)
            row.insert(max(0, min(len(row), at + draw.randint(-3, 3))), text)


def with_batches(draw: random.Random, rows: list[list[str]]) -> list[list[str]]:
    """Join some sends and receives that follow each other."""
    joined: list[list[str]] = []
    for row in rows:
        joined.append([])
        for text in row:
            beside = joined[-1] and is_transfer(joined[-1][-1]) and is_transfer(text)
            if beside and draw.random() < 0.4:
                joined[-1][-1] += f"+{text}"
            else:
                joined[-1].append(text)
    return joined


def drawn(seed: int, *, tiny: bool) -> list[list[str]]:
    """The lists of a seed: legal, stalling or with actions in a wrong order."""
    draw = random.Random(seed)
    stages, most = draw.randint(1, 3 if tiny else 5), 1 if tiny else 3
    rows = valid_rows(draw, draw.randint(1, 2 if tiny else 4), stages, draw.randint(1, most))
    shuffle(draw, rows, draw.choice([0, 1, 3, 8]), anything=draw.random() < 0.2)
    return with_batches(draw, rows) if draw.random() < 0.5 else rows


def text_of(rows: list[list[str]]) -> str:
    return "\n".join(",".join(row) for row in rows)


def assert_like_brute_force(rows: list[list[str]], ends) -> None:
    lists = read(text_of(rows))
    problem = mistake(lists)
    for rule in RULES:
        circle = None if problem is not None else find_circle(lists, rule)
        assert ends(parse(rows), rule) == (problem is None and circle is None), (rule, problem)
        if circle is not None:
            assert_closed(lists, circle)


@pytest.mark.slow
@settings(max_examples=120)
@given(st.integers(0, 10**9))
def test_a_schedule_is_legal_if_and_only_if_a_run_of_it_ends(seed) -> None:
    assert_like_brute_force(drawn(seed, tiny=False), lambda lists, rule: outcome(lists, rule, seed))


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_every_order_of_steps_of_a_small_schedule_ends_alike(seed) -> None:
    def ends(lists, rule):
        (result,) = outcomes(lists, rule)
        return result

    assert_like_brute_force(drawn(seed, tiny=True), ends)


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_what_check_accepts_is_legal_under_the_usual_rules(seed) -> None:
    rows = drawn(seed, tiny=False)
    lists = read(text_of(rows))
    try:
        check(Schedule.from_orders(lists.orders))
    except ScheduleError:
        return
    assert mistake(lists) is None
    for rule in (WaitRule.BLOCKING, WaitRule.EAGER, WaitRule.PAIR_QUEUE):
        assert find_circle(lists, rule) is None


@pytest.mark.slow
@settings(max_examples=100)
@given(st.integers(0, 10**9))
def test_an_excerpt_is_guilty_only_if_the_whole_is(seed) -> None:
    draw = random.Random(seed)
    rows = drawn(seed, tiny=False)
    lists = read(text_of(rows))
    if mistake(lists) is not None:
        return
    cuts = [sorted(draw.choices(range(len(row) + 1), k=2)) for row in rows]
    parts = [row[first:last] for row, (first, last) in zip(rows, cuts, strict=True)]
    if not any(parts):
        return
    text = "\n".join(f"rank {r}: [..., {', '.join(part)}]" for r, part in enumerate(parts))
    excerpt = read(text)
    assert mistake(excerpt) is None
    for rule in RULES:
        circle = find_circle(excerpt, rule)
        if circle is not None:
            assert_closed(excerpt, circle)
            assert find_circle(lists, rule) is not None


@settings(max_examples=60)
@given(st.integers(0, 10**9))
def test_computations_alone_stall_if_and_only_if_a_run_of_them_does(seed) -> None:
    draw = random.Random(seed)
    rows = valid_rows(draw, draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 3))
    rows = [[text for text in row if not is_transfer(text)] for row in rows]
    shuffle(draw, rows, draw.choice([0, 2, 6]), anything=True)
    lists = read(text_of(rows))
    problem = mistake(lists)
    circle = None if problem is not None else find_circle(lists, WaitRule.EAGER)
    assert outcome(parse(rows), "eager", seed) == (problem is None and circle is None)
    if circle is not None:
        assert_closed(lists, circle)


def test_a_ring_of_ranks_that_all_send_first_is_one_circle_of_all() -> None:
    # Stage j of microbatch i is on rank (j + i): every rank sends before it receives.
    rows = [
        ["0F0", "0SEND_F0", "3RECV_F0", "3F0"],
        ["1RECV_F0", "1F0", "1SEND_F0"],
        ["2RECV_F0", "2F0", "2SEND_F0"],
    ]
    assert find_circle(read(text_of(rows)), WaitRule.BLOCKING) is None
    text = "\n".join(f"[..., {j}SEND_F0, {(j - 1) % 3 + 1}RECV_F{j}]" for j in range(3))
    assert find_circle(read(text), WaitRule.BLOCKING) is None  # nobody lists the other ends
    text = "[..., 0SEND_F0, 3RECV_F1]\n[..., 1SEND_F2, 1RECV_F0]\n[..., 2SEND_F1, 2RECV_F2]"
    circle = find_circle(read(text), WaitRule.BLOCKING)
    assert [(wait.rank, wait.for_rank) for wait in circle] == [(0, 1), (1, 2), (2, 0)]


def test_a_batch_of_a_send_and_a_receive_breaks_the_circle() -> None:
    alone = read("[..., 0SEND_F1, 2RECV_F0, 2F0]\n[..., 1SEND_F0, 1RECV_F1, 1F1]")
    batch = read("[..., [0SEND_F1, 2RECV_F0], 2F0]\n[..., [1SEND_F0, 1RECV_F1], 1F1]")
    half = read("[..., [0SEND_F1, 2RECV_F0], 2F0]\n[..., 1SEND_F0, 1RECV_F1, 1F1]")
    for rule in (WaitRule.BLOCKING, WaitRule.PAIR_QUEUE, WaitRule.RANK_QUEUE):
        assert find_circle(alone, rule) is not None
        assert find_circle(batch, rule) is None
        assert find_circle(half, rule) is None


def test_one_queue_for_each_rank_is_stricter_than_one_for_each_pair() -> None:
    rows = [
        ["0F0", "0SEND_F0", "3RECV_F0", "3F0", "0F1", "0SEND_F1", "3RECV_F1", "3F1"],
        ["1RECV_F0", "1RECV_F1", "1F0", "1SEND_F0", "1F1", "1SEND_F1"],
        ["2RECV_F0", "2F0", "2SEND_F0", "2RECV_F1", "2F1", "2SEND_F1"],
    ]
    lists = read(text_of(rows))
    assert mistake(lists) is None
    assert find_circle(lists, WaitRule.PAIR_QUEUE) is None
    assert find_circle(lists, WaitRule.BLOCKING) is None
    circle = find_circle(lists, WaitRule.RANK_QUEUE)
    assert circle is not None
    assert_closed(lists, circle)


def test_the_shortest_circle_is_shown() -> None:
    # Ranks 0, 1 and 2 wait in a circle of three, and ranks 0 and 1 also in one of two.
    text = "[..., 0SEND_F1, 2RECV_F0]\n[..., 1SEND_F0, 1RECV_F1]\n[..., 3RECV_F0, 3F0]"
    circle = find_circle(read(text), WaitRule.BLOCKING)
    assert [wait.rank for wait in circle] == [0, 1]


@pytest.mark.parametrize("rule", RULES)
def test_ranks_behind_a_circle_are_not_in_it(rule) -> None:
    text = "0F0 0SEND_F0 0B0\n1RECV_F0 1F0"
    lists = read(text.replace("0B0", "0RECV_B0 0B0").replace("1F0", "1F0 1B0 1SEND_B0"))
    assert find_circle(lists, rule) is None


def test_receives_in_the_order_of_sends_are_not_crossed() -> None:
    sends = "0F0 0F1 0SEND_F0 0SEND_F1\n"
    assert crossed_messages(read(sends + "1RECV_F0 1RECV_F1 1F0 1F1")) is None
    assert "1RECV_F1" in str(crossed_messages(read(sends + "1RECV_F1 1RECV_F0 1F0 1F1")))
