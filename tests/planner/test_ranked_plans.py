"""Plans are a sequence from the best on, and know what is not among them."""

import pytest

import echelon as ec
from echelon.planner.layout_space import LayoutSpace, SearchLimits
from echelon.planner.ranked_plans import Plans
from tests.planner.sizes import MODEL, STACK, cluster


def plans(max_memory: float = 1.5e9) -> Plans:
    limits = SearchLimits(global_batch=16, max_memory=max_memory, keep=3)
    return Plans(LayoutSpace(MODEL, cluster(1, 8), STACK, limits), "tokens/s")


def test_they_are_a_sequence_from_the_fastest_on() -> None:
    several = plans()
    assert len(several) == len(list(several)) == 3
    assert several.best is several[0]
    assert [plan.seconds for plan in several] == sorted(plan.seconds for plan in several)
    assert several[1:] == [several[1], several[2]]
    assert several.num_fitting < several.num_layouts


def test_the_front_begins_with_the_fastest() -> None:
    several = plans()
    assert several.pareto[0].seconds == several.best.seconds
    assert all(plan.memory.total <= 1.5e9 for plan in several.pareto)


def test_if_none_fits_it_is_empty_and_the_best_says_why() -> None:
    none = plans(max_memory=1e6)
    assert len(none) == 0
    assert not none
    assert none.refused[0].nbytes == min(plan.nbytes for plan in none.refused)
    with pytest.raises(ec.UnsupportedError, match=r"none of \d+ plans fits.*rank \d+ would have"):
        _ = none.best
    assert "0 of" in repr(none)


def test_its_text_is_a_line() -> None:
    several = plans()
    assert repr(several) == (
        f"<Plans of 8 round: {several.num_fitting} of {several.num_layouts} fit, best "
        f"{several.best}>"
    )
