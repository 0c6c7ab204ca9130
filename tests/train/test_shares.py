"""The division of a batch among ranks."""

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import echelon as ec
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


def test_the_epochs_of_a_job_are_counted_over_its_resumes() -> None:
    data, taken, state = torch.arange(6), list[list[int]](), None
    for num in (2, 2, 100, 100):
        sampler = ec.ResumableSampler(len(data), 2, (0, 1), shuffle=False)
        if state is not None:
            sampler.load_state_dict(state)
        loader = DataLoader(data, batch_sampler=sampler)
        taken += [b.tolist() for b in islice(sampler.batches(loader, total_epochs=2), num)]
        state = sampler.state_dict()
    assert taken == 2 * [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(ArgumentError, match="epochs is 2 and total_epochs 2: give one"):
        sampler.batches(loader, epochs=2, total_epochs=2)
