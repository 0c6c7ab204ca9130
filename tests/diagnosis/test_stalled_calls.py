"""The first collective that holds up a device, found in what all ranks have issued."""

from __future__ import annotations

import random

import pytest

from echelon.diagnosis.stalled_calls import IssuedCall, Stall, dump, find_stall, load

CALLS = [IssuedCall(i, f"all_reduce {i}", f"train.py:{i}") for i in range(8)]


def test_the_first_call_that_a_rank_has_not_issued_is_found_whatever_the_others_have() -> None:
    dice = random.Random(0)
    for _ in range(500):
        done = dice.randint(0, 3)
        stops = [dice.randint(done, 7) for _ in range(dice.randint(1, 5))]
        issued = {rank: CALLS[: stop + 1] for rank, stop in enumerate(stops)}
        stall = find_stall(CALLS[done : stops[0] + 1], issued)
        first = min(stops) + 1
        if first > stops[0]:
            assert stall == Stall(None, {}, (), ())
        else:
            missing = tuple(rank for rank, stop in enumerate(stops) if stop < first)
            assert stall == Stall(CALLS[first], {}, missing, ())


def test_another_call_in_its_place_comes_before_ranks_that_are_missing_later() -> None:
    other = IssuedCall(1, "broadcast", "eval.py:4")
    stall = find_stall(CALLS[:4], {0: CALLS[:4], 1: [CALLS[0], other], 2: None})
    assert stall.call == CALLS[1]
    assert stall.different == {0: "all_reduce 1 at train.py:1", 1: "broadcast at eval.py:4"}
    assert stall.silent == (2,)


def test_calls_that_a_rank_no_longer_remembers_are_not_taken_for_missing() -> None:
    assert find_stall(CALLS[:2], {0: CALLS[:2], 1: CALLS[4:]}) == Stall(None, {}, (), ())


def test_a_rank_that_says_nothing_is_told() -> None:
    assert find_stall(CALLS[:2], {0: CALLS[:2], 1: None}) == Stall(CALLS[0], {}, (), (1,))


def test_what_is_dumped_is_loaded() -> None:
    text = dump({"world": CALLS, "world.1": []}).encode()
    assert load(text, "world") == CALLS
    assert load(text, "world.1") == []
    assert load(text, "another") == []


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"1", b'{"world": 1}', b'{"world": [[1]]}', b"[" * 9000]
)
def test_something_else_in_the_store_counts_as_no_answer(text: bytes) -> None:
    assert load(text, "world") is None
