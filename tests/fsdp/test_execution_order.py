"""What a rank gathers that skips units: the same as all others."""

from __future__ import annotations

import itertools

import pytest

from echelon.fsdp.execution_order import PassOrder, common_order


def gathered(order: PassOrder, used: list[int]) -> list[int]:
    """All gathers of a pass that reaches these units."""
    order.begin()
    return [v for u in used for v in (*order.reach(u), u)] + order.take_rest()


def test_whatever_ranks_leave_out_they_gather_the_same() -> None:
    expected = [3, 1, 2, 3, 4]
    for length in range(len(expected) + 1):
        for used in itertools.combinations(expected, length):
            order = PassOrder(expected)
            assert gathered(order, list(used)) == expected
            assert not order.deviated


def test_units_in_another_order_are_gathered_when_they_are_reached() -> None:
    order = PassOrder([1, 2, 3])
    assert gathered(order, [2, 1, 3]) == [1, 2, 1, 3]
    assert order.deviated
    assert order.reached == [2, 1, 3]
    order.begin()
    assert not order.deviated


def test_nothing_is_predicted_from_a_guess_or_after_another_order() -> None:
    assert PassOrder([1, 2], is_guess=True).peek() is None
    order = PassOrder([1, 2, 3, 4])
    assert order.peek() == 1
    order.take_next()
    order.note_reached(1)
    assert order.reach(3) == [2]
    assert order.peek() == 4
    order.reach(1)
    assert order.peek() is None
    assert order.take_rest() == [4]
    assert order.reached == [1, 3, 1]


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
        assert gathered(PassOrder(found), order) == found


def test_what_no_backward_needs_is_left_out() -> None:
    assert common_order([[3, 2], [3]], usual=[4, 3, 2, 1], without={1, 2, 3}) == [4, 3, 2]
