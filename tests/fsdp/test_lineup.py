"""What a rank gathers that skips units: the same as all others."""

from __future__ import annotations

import itertools

import pytest

from echelon.fsdp.lineup import Lineup, common_order


def gathered(lineup: Lineup, used: list[int]) -> list[int]:
    """All gathers of a pass that reaches these units."""
    lineup.begin()
    return [v for u in used for v in (*lineup.reached(u), u)] + lineup.rest()


def test_whatever_ranks_leave_out_they_gather_the_same() -> None:
    expected = [3, 1, 2, 3, 4]
    for length in range(len(expected) + 1):
        for used in itertools.combinations(expected, length):
            lineup = Lineup(expected)
            assert gathered(lineup, list(used)) == expected
            assert not lineup.strayed


def test_units_in_another_order_are_gathered_when_they_are_reached() -> None:
    lineup = Lineup([1, 2, 3])
    assert gathered(lineup, [2, 1, 3]) == [1, 2, 1, 3]
    assert lineup.strayed
    assert lineup.real == [2, 1, 3]
    lineup.begin()
    assert not lineup.strayed


def test_nothing_is_predicted_from_a_guess_or_after_another_order() -> None:
    assert Lineup([1, 2], guess=True).next() is None
    lineup = Lineup([1, 2, 3, 4])
    assert lineup.next() == 1
    lineup.advance()
    lineup.arrived(1)
    assert lineup.reached(3) == [2]
    assert lineup.next() == 4
    lineup.reached(1)
    assert lineup.next() is None
    assert lineup.rest() == [4]
    assert lineup.real == [1, 3, 1]


@pytest.mark.parametrize(
    ("orders", "common"),
    [
        ([[1, 2, 3], [1, 2, 3]], [1, 2, 3, 4]),
        ([[2, 3], [1, 3]], [1, 2, 3, 4]),
        ([[3, 1], [3, 2, 1]], [3, 4, 2, 1]),
        ([[1], [1, 1]], [1, 2, 3, 4, 1]),
        ([[], []], [1, 2, 3, 4]),
    ],
)
def test_the_common_order_contains_that_of_every_rank(
    orders: list[list[int]], common: list[int]
) -> None:
    found = common_order(orders, usual=[1, 2, 3, 4])
    assert found == common
    for order in orders:
        assert gathered(Lineup(found), order) == found


def test_what_no_backward_needs_is_left_out() -> None:
    assert common_order([[3, 2], [3]], usual=[4, 3, 2, 1], without={1, 2, 3}) == [4, 3, 2]
