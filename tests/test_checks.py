"""Each check names the argument and the value, and says what to give."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import echelon as ec
from echelon import checks
from echelon.errors import ArgumentError, RankError

Check = Callable[[object], object]


@pytest.mark.parametrize(
    ("check", "good", "bad", "sentence"),
    [
        (lambda v: checks.integer("n", v, low=1), 4, 0, "n is 0; give a whole number >= 1"),
        (lambda v: checks.integer("n", v, high=9), 9, 10, "n is 10; give a whole number <= 9"),
        (lambda v: checks.integer("n", v), 0, True, "n is True; give a whole number >= 0"),
        (lambda v: checks.integers("n", v), [1, 2], [1, "2"], r"n\[1\] is '2'; give a whole"),
        (lambda v: checks.integers("n", v), range(2), "12", "n is '12'; give a list of whole"),
        (lambda v: checks.number("x", v, 1.0), 1, 0.5, "x is 0.5; it must be a number of at least"),
        (lambda v: checks.number("x", v, 1.0, 2.0), 2.0, math.nan, "x is nan; .*, up to 2"),
        (lambda v: checks.positive("x", v), 0.1, 0, "x is 0; it must be a number > 0"),
        (lambda v: checks.one_of("x", v, ("a", 1)), 1, True, "x is True; use one of 'a', 1"),
        (lambda v: checks.flag("x", v), False, 0, "x is 0; use one of True, False"),
        (
            lambda v: checks.floating("x", v),
            torch.half,
            torch.int8,
            "x is torch.int8; give a float",
        ),
        (lambda v: checks.floating("x", v), None, torch.ones(1), "x is .*; give a floating point"),
        (lambda v: checks.reduction(v), "mean", "max", "reduction is 'max'; use 'mean', 'sum'"),
        (lambda v: checks.reduction(v), 2, 0, "reduction is 0; use 'mean', 'sum'"),
        (lambda v: checks.instance("s", v, str), "a", None, "s is None; give a text"),
        (lambda v: checks.instance("s", v, str, or_none=True), None, 1, "s is 1; give a text"),
        (lambda v: checks.function("f", v, "x"), len, None, "f is None; give a function of x"),
        (lambda v: checks.function("f", v, "x", or_none=True), None, 1, "f is 1; give a function"),
        (lambda v: checks.mapping("m", v), {"a": 1}, {1: 1}, "m is .*; give values by name"),
        (lambda v: checks.path("p", v), Path("a"), 3, "p is 3; give a path"),
    ],
)
def test_what_is_good_passes_and_what_is_bad_is_named(
    check: Check, good: object, bad: object, sentence: str
) -> None:
    check(good)
    with pytest.raises(ArgumentError, match=f"^{sentence}"):
        check(bad)


def test_numbers_are_pythons_own() -> None:
    assert type(checks.integer("n", torch.tensor(3))) is int
    assert type(checks.number("x", 3, 0.0)) is float


@pytest.mark.parametrize("rank", [-1, 2, True, 1.0, None])
def test_a_rank_is_one_of_its_group(rank: object) -> None:
    checks.rank("src", 1, 2)
    with pytest.raises(RankError, match="src"):
        checks.rank("src", rank, 2)


@pytest.mark.parametrize("kind", [ec.Group, ec.World, ec.Plan, ec.MixedPrecision, torch.nn.Module])
def test_it_is_said_what_to_give_for_a_class(kind: type) -> None:
    with pytest.raises(ArgumentError, match=r"^argument is 3; give "):
        checks.instance("argument", 3, kind)
