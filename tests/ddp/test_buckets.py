"""The cut into buckets: pure, so every row of the table is one line."""

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.ddp.buckets import compute_buckets, plan_buckets
from echelon.ddp.options import DDPOptions
from echelon.errors import ArgumentError


@pytest.mark.parametrize(
    ("nbytes", "cap", "expected"),
    [
        ([40, 40, 40], 80, [[2, 1], [0]]),
        ([40, 40, 40], 79, [[2], [1], [0]]),
        ([40, 40, 40], 40, [[2], [1], [0]]),
        ([40, 40, 40], 0, [[2], [1], [0]]),
        ([40, 40, 40], 120, [[2, 1, 0]]),
        ([40, 40, 40], 25 * 2**20, [[2, 1, 0]]),
        ([40, 400, 40], 100, [[2], [1], [0]]),
        ([], 100, []),
        ([0, 40, 0], 40, [[2, 1, 0]]),
    ],
)
def test_buckets_are_filled_in_reverse_order_and_closed_before_their_cap(nbytes, cap, expected):
    assert compute_buckets(nbytes, cap) == expected


def test_the_first_bucket_has_a_cap_of_its_own():
    assert compute_buckets([10] * 6, 30, first_bucket_bytes=10) == [[5], [4, 3, 2], [1, 0]]


def test_kinds_do_not_share_a_bucket_and_buckets_come_in_the_order_of_their_last_member():
    buckets = compute_buckets([8, 4, 8, 4], 100, kinds=["f", "h", "f", "h"])
    assert buckets == [[3, 1], [2, 0]]


def test_a_given_order_of_arrival_is_followed():
    assert compute_buckets([1, 1, 1, 1], 2, order=[1, 3, 0, 2]) == [[1, 3], [0, 2]]


@pytest.mark.parametrize("order", [[0, 0, 1], [0, 1], [0, 1, 3]])
def test_an_order_that_is_no_permutation_is_refused(order):
    with pytest.raises(ArgumentError, match="not a permutation"):
        compute_buckets([1, 1, 1], 10, order=order)


def test_a_negative_cap_is_refused():
    with pytest.raises(ArgumentError, match="caps are bytes >= 0"):
        compute_buckets([1], -1)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("fh")), max_size=30),
    st.integers(0, 120),
    st.integers(0, 120),
    st.integers(0, 2**32),
)
def test_every_gradient_is_in_one_bucket_of_one_kind_within_its_cap(items, cap, first, seed):
    nbytes = [size for size, _ in items]
    kinds = [kind for _, kind in items]
    order = Random(seed).sample(range(len(items)), len(items))
    buckets = compute_buckets(nbytes, cap, first, kinds=kinds, order=order)
    assert sorted(i for bucket in buckets for i in bucket) == list(range(len(items)))
    for bucket in buckets:
        assert len({kinds[i] for i in bucket}) == 1
        assert len(bucket) == 1 or sum(nbytes[i] for i in bucket) <= max(cap, first)
        assert bucket == sorted(bucket, key=order.index)
    lasts = [order.index(bucket[-1]) for bucket in buckets]
    assert lasts == sorted(lasts)


def test_a_plan_aligns_every_gradient_to_a_cache_line():
    (plan,) = plan_buckets([torch.zeros(n) for n in (5, 17, 1)], DDPOptions())
    assert plan.indices == (2, 1, 0)
    assert plan.placement.starts == (0, 16, 48)
    assert plan.placement.numel == 53
