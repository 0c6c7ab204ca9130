"""Whole verdicts: lists that users of PyTorch posted, and all schedules of PyTorch."""

import csv

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline import WaitRule, judge
from tests.pipeline.schedules.brute_force import outcome, parse
from tests.pipeline.schedules.torch_lists import NAMES, dump, make

POSTED = """\
rank 0: [...  2SEND_F1, 0F2, 0SEND_F2, 2RECV_B0, 2B0]
rank 1: [...  3RECV_F1, 3SEND_B0, 3F1, 3B1, 1RECV_F2, 3SEND_B1, 1F2]
"""


def assert_judged_like_brute_force(name, ranks, microbatches, folder) -> None:
    files = dump(name, ranks, microbatches, folder)
    verdict = judge(files["comms"], list(WaitRule))
    assert verdict.problem is None
    with files["comms"].open() as file:
        lists = parse(list(csv.reader(file)))
    for rule, circle in verdict.circles.items():
        assert (circle is None) == outcome(lists, rule), (name, ranks, rule)
    alone = judge(files["compute"], list(WaitRule))
    assert alone.problem is None
    legal = {rule: circle is None for rule, circle in alone.circles.items()}
    assert legal == {rule: circle is None for rule, circle in verdict.circles.items()}


@pytest.mark.parametrize("name", NAMES)
def test_schedules_of_pytorch_are_judged_as_a_brute_force_runs_them(name, tmp_path) -> None:
    for ranks in (2, 3):
        assert_judged_like_brute_force(name, ranks, 2 * ranks, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_schedules_of_pytorch_on_more_ranks_are_judged_so_too(name, tmp_path) -> None:
    for ranks in (4, 5, 6, 7, 8):
        assert_judged_like_brute_force(name, ranks, 2 * ranks, tmp_path)


def test_the_posted_lists_are_guilty_with_their_circle() -> None:
    verdict = judge(POSTED)
    assert not verdict.is_legal
    circle = verdict.circles[WaitRule.BLOCKING]
    assert [(wait.rank, str(wait.action), str(wait.for_action)) for wait in circle] == [
        (0, "0SEND_F2", "1RECV_F2"),
        (1, "3SEND_B0", "2RECV_B0"),
    ]
    assert verdict.circles[WaitRule.EAGER] is None
    assert verdict.circles[WaitRule.PAIR_QUEUE] is not None


def test_gpipe_with_fewer_microbatches_than_stages_is_legal(tmp_path) -> None:
    for microbatches in (1, 2, 3):
        for path in dump("GPipe", 4, microbatches, tmp_path).values():
            assert judge(path, list(WaitRule)[:3]).is_legal


def test_the_printed_order_of_1f1b_of_pytorch_is_named_as_incomplete() -> None:
    orders = make("1F1B", 2, 4).pipeline_order
    verdict = judge(str(orders))
    assert not verdict.is_legal
    assert "0F4" in str(verdict.problem)


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ArgumentError, match="there is no rule 'magic'"):
        judge(POSTED, ["magic"])


GUILTY = "[... 0SendF1, 2RecvF0, 2F0]\n[... 1SendF0, 1RecvF1, 1F1]"


def test_the_circle_is_drawn_with_both_ranks_and_places() -> None:
    text = str(judge(GUILTY, ["blocking"]))
    assert "NOT LEGAL: rank 0 at 0SEND_F1, rank 1 at 1SEND_F0" in text
    assert "rank 0 │ 0SEND_F1 2RECV_F0 2F0" in text
    assert "┌─▶ rank 0 waits at 0SEND_F1 (line 1, column 6)" in text


def test_of_long_lists_what_is_near_the_circle_is_drawn() -> None:
    rows = [f"[..., {', '.join(f'{r}F{i}' for i in range(3, 13))}, " for r in (0, 1)]
    text = f"{rows[0]}0SEND_F2, 2RECV_F0, 2F0]\n{rows[1]}1SEND_F0, 1RECV_F2, 1F2]"
    drawn = str(judge(text, ["blocking"]))
    assert "rank 0 │ … 0F11 0F12 0SEND_F2 2RECV_F0 2F0\n" in drawn
