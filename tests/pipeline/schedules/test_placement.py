"""Which rank holds which stage."""

import pytest

from echelon.pipeline.schedules.looped import loop
from echelon.pipeline.schedules.vshaped import snake, v_shape


@pytest.mark.parametrize("p", range(1, 7))
@pytest.mark.parametrize("v", range(1, 5))
def test_every_rank_holds_one_stage_of_each_chunk(p, v) -> None:
    for placement in (loop(p, v), snake(p, v)):
        for c in range(v):
            assert sorted(placement[c * p : (c + 1) * p]) == list(range(p))


@pytest.mark.parametrize("p", range(1, 7))
def test_a_v_holds_stage_r_and_its_mirror_on_rank_r(p) -> None:
    placement = v_shape(p)
    assert [(placement[r], placement[2 * p - 1 - r]) for r in range(p)] == [
        (r, r) for r in range(p)
    ]


def test_a_snake_never_leaves_the_rank_where_two_chunks_touch() -> None:
    placement = snake(3, 4)
    assert all(placement[c * 3 - 1] == placement[c * 3] for c in (1, 2, 3))
