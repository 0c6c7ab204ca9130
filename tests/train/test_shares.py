"""The division of a batch among ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ArgumentError, RankError
from echelon.train.shares import rank_and_size, share_of, shares_of


@given(st.integers(0, 100), st.integers(0, 50), st.integers(1, 12))
def test_the_shares_cover_a_batch_once_in_rank_order_and_differ_by_one(
    start: int, length: int, size: int
) -> None:
    batch = range(start, start + length)
    shares = [share_of(batch, rank, size) for rank in range(size)]
    assert [position for share in shares for position in share] == list(batch)
    assert tuple(map(len, shares)) == shares_of(length, size)
    assert sorted(map(len, shares), reverse=True) == [*map(len, shares)]
    assert len(shares[0]) - len(shares[-1]) <= 1


def test_a_rank_has_its_place_among_those_that_share_a_batch() -> None:
    assert rank_and_size((1, 3)) == (1, 3)
    with pytest.raises(RankError):
        rank_and_size((3, 3))
    with pytest.raises(ArgumentError, match="give a Group such as"):
        rank_and_size(3)
