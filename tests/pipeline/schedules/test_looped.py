"""Schedules on a loop have the memory and the bubble of their docstrings."""

import itertools
from fractions import Fraction

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline import schedule, simulate
from echelon.pipeline.schedules.looped import loop
from tests.pipeline.schedules.formulas import close, first_group, sizes


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("v", range(1, 5))
def test_every_rank_holds_one_stage_of_each_chunk(p, v) -> None:
    placement = loop(p, v)
    for c in range(v):
        assert sorted(placement[c * p : (c + 1) * p]) == list(range(p))


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_schedules_of_one_chunk_have_their_memory_and_their_bubble(name) -> None:
    for p, m in sizes():
        found = simulate(schedule(name, p, m, p))
        wanted = [m] * p if name == "gpipe" else [min(m, p - r) for r in range(p)]
        assert list(found.peak) == wanted
        assert close(found.span_bubble, Fraction(p - 1, m + p - 1))


@pytest.mark.slow
@pytest.mark.parametrize("v", [2, 3, 4])
@pytest.mark.parametrize("factor", [1, 2])
def test_interleaved_has_its_memory_and_its_bubble(v, factor) -> None:
    for p, m in sizes():
        found, g = simulate(schedule("interleaved", v * p, m, p, factor=factor)), first_group(p, m)
        for r, peak in enumerate(found.peak):
            bound = Fraction((v - 1) * g + factor * (p - 1 - r) + 1, v)
            assert close(peak, min(Fraction(m), bound))
        if m >= p:
            assert close(found.span_bubble, Fraction(p - 1, v * m + p - 1))


@pytest.mark.slow
@pytest.mark.parametrize("v", [1, 2, 4])
def test_looped_bfs_and_forward_only_have_their_memory_and_their_bubble(v) -> None:
    for p, m in sizes(least=1):
        found = simulate(schedule("looped-bfs", v * p, m, p))
        assert set(found.peak) == {m}
        assert close(found.span_bubble, Fraction(p - 1, v * m + p - 1))
        forward = simulate(schedule("forward-only", v * p, m, p))
        assert set(forward.peak) == {0}
        assert close(forward.span_bubble, Fraction(p - 1, v * m + p - 1))


@pytest.mark.slow
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_zb_of_k_1_has_its_memory_and_its_bubble(v) -> None:
    for p, m in sizes(least=1):
        found, g = simulate(schedule("zb", v * p, m, p)), first_group(p, m)
        wanted = Fraction((v - 1) * g + p, v)
        assert all(close(peak, min(Fraction(m), wanted)) for peak in found.peak)
        assert close(found.span_bubble, Fraction(p - 1, 3 * v * m + p - 1))
        assert close(found.own_bubble, Fraction(p - 1, 3 * v * m + p - 1))


def test_zb_of_any_k_runs_in_its_memory_or_is_refused() -> None:
    refused = []
    for p, m, v, k in itertools.product(range(1, 6), range(1, 13), (1, 2, 3), (1, 2, 3, 4, 6)):
        try:
            found = simulate(schedule("zb", v * p, m, p, k=k))
        except ArgumentError as error:
            refused.append((v > 1, k > 2, "use k=2" in str(error)))
        else:
            wanted = Fraction((v - 1) * first_group(p, m) + k * (p - 1) + 1, v)
            assert all(close(peak, min(Fraction(m), wanted)) for peak in found.peak)
    assert set(refused) == {(True, True, True)}


def test_zb_h1_and_zb_h2_are_zb_of_one_chunk() -> None:
    for p, m in sizes():
        for k, name in ((1, "zb-h1"), (2, "zb-h2")):
            assert schedule(name, p, m, p).orders == schedule("zb", p, m, p, k=k).orders


def test_zb_h2_leaves_no_rank_idle_between_its_ends_and_needs_twice_the_memory() -> None:
    for p, m in sizes():
        if m >= 2 * p - 1:
            found = simulate(schedule("zb-h2", p, m, p))
            assert found.peak == (2 * p - 1,) * p
            assert close(found.own_bubble, Fraction(0))
            assert close(found.span_bubble, Fraction(p - 1, 3 * m + p - 1))


@pytest.mark.parametrize(("v", "m"), [(2, 16), (3, 17), (4, 23)])
def test_a_larger_k_hides_messages_for_the_memory_that_its_docstring_says(v, m) -> None:
    for p in (2, 4, 8):
        g = first_group(p, m)
        found = simulate(schedule("zb", v * p, m, p, k=2))
        assert all(close(peak, Fraction((v - 1) * g + 2 * (p - 1) + 1, v)) for peak in found.peak)
    costs = {"F": 1 / v, "I": 1 / v, "W": 1 / v, "hop": 0.1}
    loose, tight = (simulate(schedule("zb", 8 * v, 32, 8, k=k), costs) for k in (2, 1))
    assert loose.makespan < tight.makespan
