"""The arithmetic of shards: nothing is lost, nothing overlaps."""

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon import ranges
from echelon.errors import ArgumentError, RankError
from echelon.ranges import even_chunks, pack, shard_range

LENGTHS = st.lists(st.integers(0, 1000), max_size=30)


def test_the_examples_run() -> None:
    assert doctest.testmod(ranges).failed == 0


@given(numel=st.integers(0, 10_000), size=st.integers(1, 64))
def test_shards_cover_the_buffer_once_and_differ_by_at_most_one_element(numel, size) -> None:
    ranges = [shard_range(numel, size, rank) for rank in range(size)]
    assert [i for start, stop in ranges for i in range(start, stop)] == list(range(numel))
    lengths = [stop - start for start, stop in ranges]
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("numel", "size", "lengths"),
    [
        (10, 4, [3, 3, 2, 2]),
        (3, 5, [1, 1, 1, 0, 0]),
        (1001, 2, [501, 500]),
        (7, 4, [2, 2, 2, 1]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_the_first_ranks_own_one_element_more(numel, size, lengths) -> None:
    ranges = [shard_range(numel, size, rank) for rank in range(size)]
    assert [stop - start for start, stop in ranges] == lengths


@pytest.mark.parametrize(("size", "rank"), [(4, 4), (4, -1), (0, 0), (-1, 0)])
def test_a_rank_outside_the_group_has_no_shard(size, rank) -> None:
    with pytest.raises(RankError, match="need 0 <= rank"):
        shard_range(10, size, rank)


@pytest.mark.slow
@given(numel=st.integers(0, 10_000), size=st.integers(1, 64), align=st.integers(1, 100))
def test_even_chunks_cover_the_buffer_once_and_begin_at_multiples(numel, size, align) -> None:
    chunks = even_chunks(numel, size, align)
    assert len(chunks) == size
    assert [i for start, stop in chunks for i in range(start, stop)] == list(range(numel))
    assert all(start % align == 0 or start == stop == numel for start, stop in chunks)


@given(numels=LENGTHS, align=st.integers(1, 64))
def test_packed_tensors_do_not_overlap_and_lose_less_than_one_alignment_each(numels, align) -> None:
    placement = pack(numels, align)
    assert placement.numels == tuple(numels)
    end = 0
    for start, numel in zip(placement.starts, placement.numels, strict=True):
        assert start % align == 0
        assert 0 <= start - end < align
        end = start + numel
    assert placement.numel == end


@pytest.mark.parametrize("call", [lambda: pack([1], 0), lambda: pack([1, -1]), lambda: pack([], 0)])
def test_lengths_and_alignments_must_make_sense(call) -> None:
    with pytest.raises(ArgumentError, match="cannot pack"):
        call()


@pytest.mark.parametrize(("size", "align"), [(0, 1), (1, 0)])
def test_chunks_need_a_size_and_an_alignment(size, align) -> None:
    with pytest.raises(ArgumentError, match="cannot cut 5 elements"):
        even_chunks(5, size, align)
