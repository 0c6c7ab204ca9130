import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.page.ticks import number_text, thinned, ticks

FINITE = st.floats(-1e9, 1e9)


@pytest.mark.slow
@given(FINITE, st.floats(1e-3, 1e9), st.integers(2, 12))
def test_ticks_are_few_ascending_and_inside(low: float, span: float, most: int) -> None:
    places = ticks(low, low + span, most)
    assert 1 <= len(places) <= most
    assert places == sorted(places)
    margin = 1e-6 * (abs(low) + span)
    assert all(low - margin <= place <= low + span + margin for place in places)


def test_ticks_of_nothing_are_one() -> None:
    assert ticks(3.0, 3.0) == [3.0]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.0, 8.2), (120.0, 880.0)])
def test_an_axis_has_at_least_two_labels(low: float, high: float) -> None:
    assert len(ticks(low, high, most=5)) >= 2


def test_numbers_are_short() -> None:
    assert number_text(-2500.0) == "-2.5k"
    assert number_text(1e-15) == "0"


@pytest.mark.slow
@given(st.lists(st.one_of(st.none(), FINITE), min_size=1, max_size=3000))
def test_a_thinned_line_keeps_its_highest_and_lowest_value(values: list[float | None]) -> None:
    places = thinned(values, limit=50)
    assert len(places) <= max(50, 1)
    assert places == sorted(set(places))
    known = [value for value in values if value is not None]
    kept = [values[i] for i in places if values[i] is not None]
    if known:
        assert (max(kept), min(kept)) == (max(known), min(known))
