"""Schedules on a V have the memory and the bubble of their docstrings."""

from fractions import Fraction

import pytest

from echelon.pipeline import schedule, simulate
from echelon.pipeline.schedules.vshaped import v_shape
from tests.pipeline.schedules.formulas import close, sizes


@pytest.mark.parametrize("p", range(1, 7))
def test_a_v_holds_stage_r_and_its_mirror_on_rank_r(p) -> None:
    placement = v_shape(p)
    assert [(placement[r], placement[2 * p - 1 - r]) for r in range(p)] == [
        (r, r) for r in range(p)
    ]


def test_zb_v_leaves_no_rank_idle_and_needs_p_everywhere() -> None:
    for p, m in sizes():
        found = simulate(schedule("zb-v", 2 * p, m, p))
        assert max(found.peak) <= p
        if m >= 2 * p - 1:
            assert found.peak == (p,) * p
            assert close(found.own_bubble, Fraction(0))
            assert close(found.span_bubble, Fraction(p - 1, 6 * m + p - 1))


@pytest.mark.parametrize("fused", [False, True])
def test_dualpipe_v_has_its_memory_and_its_bubble(fused) -> None:
    for p, m in sizes(least=2):
        found = simulate(schedule("dualpipe-v", 2 * p, m, p, fused=fused))
        assert set(found.peak) == {p + 0.5}
        assert close(found.span_bubble, Fraction(p - 1, (3 if fused else 6) * m + p - 1))
