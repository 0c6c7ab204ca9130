"""Where parameters lie in a unit and who owns what; pure arithmetic."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echelon.errors import ArgumentError
from echelon.fsdp.shard_layout import layout_by_element, layout_by_rows, place_order

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5)


@pytest.mark.parametrize(
    ("numel", "ranks", "sizes"),
    [
        (10, 4, [3, 3, 2, 2]),
        (3, 5, [1, 1, 1, 0, 0]),
        (1001, 2, [501, 500]),
        (5, 2, [3, 2]),
        (4, 2, [2, 2]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_a_flat_cut_gives_the_first_ranks_one_more(numel, ranks, sizes) -> None:
    info = layout_by_element([(numel,)], ranks).info(0)
    assert [one.size for one in info] == sizes
    assert [one.start for one in info] == [sum(sizes[:r]) for r in range(ranks)]
    assert [one.rank for one in info] == list(range(ranks))


@pytest.mark.parametrize(
    ("rows", "ranks", "counts"),
    [
        (3, 2, [2, 1]),
        (7, 3, [3, 2, 2]),
        (2, 4, [1, 1, 0, 0]),
        (1, 3, [1, 0, 0]),
        (5, 4, [2, 1, 1, 1]),
        (9, 4, [3, 2, 2, 2]),
    ],
)
def test_rows_are_never_torn_and_some_ranks_may_own_none(rows, ranks, counts) -> None:
    info = layout_by_rows([(rows, 3)], ranks).info(0)
    assert [one.size for one in info] == [3 * count for count in counts]
    assert all(one.shape == (rows, 3) for one in info)


@example(shapes=[(1, 1025, 3), (65, 7), ()], ranks=64, rows=True)
@given(shapes=SHAPES, ranks=st.integers(1, 7), rows=st.booleans())
def test_every_element_has_one_owner(shapes, ranks, rows) -> None:
    cut = (layout_by_rows if rows else layout_by_element)(shapes, ranks)
    assert cut.numel == sum(map(math.prod, shapes)) == sum(cut.numels_by_rank)
    for member, shape in enumerate(shapes):
        owned = [i for one in cut.info(member) for i in range(one.start, one.start + one.size)]
        assert owned == list(range(math.prod(shape)))
    if not rows:
        assert max(cut.numels_by_rank) - min(cut.numels_by_rank) <= 1


@given(numels=st.lists(st.integers(0, 300), max_size=8), itemsize=st.sampled_from([1, 2, 4, 8]))
def test_no_padding_is_needed_for_alignment(numels, itemsize) -> None:
    order = place_order(numels, itemsize)
    assert sorted(order) == list(range(len(numels)))
    start = 0
    for i in order:
        nbytes = numels[i] * itemsize
        if nbytes:
            assert start % min(64, nbytes & -nbytes) == 0
        start += nbytes


def test_parameters_of_whole_cache_lines_keep_the_order_of_the_model() -> None:
    assert place_order([16, 32, 48], 4) == [0, 1, 2]


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ArgumentError, match="0 ranks"):
        layout_by_element([(3,)], 0)
