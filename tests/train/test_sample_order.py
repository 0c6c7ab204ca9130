"""The shuffled order is a permutation, any of them, and the same one for ever."""

import hashlib
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ArgumentError
from echelon.train.sample_order import SampleOrder, shuffled


def order(num_samples: int, seed: int = 0, epoch: int = 0) -> list[int]:
    return shuffled(np.arange(num_samples, dtype=np.uint64), num_samples, seed, epoch).tolist()


@given(st.integers(1, 400), st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_every_sample_has_one_position(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(order(num_samples, seed, epoch)) == list(range(num_samples))


@given(st.integers(1, 2**48), st.lists(st.integers(0), min_size=1, max_size=50, unique=True))
def test_a_position_alone_gives_what_it_gives_among_others(
    num_samples: int, positions: list[int]
) -> None:
    where = np.array(sorted({p % num_samples for p in positions}), dtype=np.uint64)
    together = shuffled(where, num_samples, 1, 2)
    assert len(set(together.tolist())) == len(where)
    assert together.max() < num_samples
    for position, sample in zip(where, together, strict=True):
        assert shuffled(where[where == position], num_samples, 1, 2).tolist() == [sample]


def hashed(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def in_whole_numbers(position: int, num_samples: int, seed: int, epoch: int) -> int:
    """The same function on Python's numbers, which know no word size and no byte order."""
    rows = next(n for n in itertools.count(2, 2) if n * n >= num_samples)
    columns = math.ceil(num_samples / rows)
    digest = hashlib.shake_256(f"{seed} {epoch}".encode()).digest(128)
    keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 128, 8)]
    while True:
        row, column = position // columns, position % columns
        for i in range(0, 16, 2):
            row = (row + hashed(column ^ keys[i])) % rows
            column = (column + hashed(row ^ keys[i + 1])) % columns
        position = row * columns + column
        if position < num_samples:
            return position


@given(st.integers(1, 10_000), st.integers(0), st.integers(0, 2**64 - 1), st.integers(0, 100))
def test_words_of_64_bits_give_what_whole_numbers_give(
    num_samples: int, position: int, seed: int, epoch: int
) -> None:
    position %= num_samples
    sample = shuffled(np.array([position], dtype=np.uint64), num_samples, seed, epoch)
    assert sample.tolist() == [in_whole_numbers(position, num_samples, seed, epoch)]


def test_the_order_of_a_seed_never_changes() -> None:
    # A job that resumes with a newer version must go on in the same order: if this fails, the
    # version of SampleOrder must rise.
    assert order(10) == [5, 6, 4, 7, 3, 9, 1, 2, 8, 0]
    assert order(10, epoch=1) == [8, 4, 7, 3, 6, 9, 1, 0, 2, 5]
    assert order(10, seed=1) == [0, 4, 5, 8, 3, 2, 7, 9, 1, 6]
    far = np.array([0, 1, 10**12 - 1], dtype=np.uint64)
    assert shuffled(far, 10**12, 7, 3).tolist() == [926091728747, 920499487330, 479432694489]
    assert SampleOrder(num_samples=1, batch_size=1).version == 1


@pytest.mark.slow
@pytest.mark.parametrize(("num_samples", "num_seeds"), [(3, 300), (5, 1200)])
def test_all_orders_of_a_few_samples_are_equally_frequent(num_samples: int, num_seeds: int) -> None:
    num_orders = math.factorial(num_samples)
    counts = Counter(tuple(order(num_samples, seed)) for seed in range(num_seeds))
    expected = num_seeds / num_orders
    chi2 = sum(
        (counts[permutation] - expected) ** 2 / expected
        for permutation in itertools.permutations(range(num_samples))
    )
    freedom = num_orders - 1
    assert abs(chi2 - freedom) < 4 * math.sqrt(2 * freedom)  # four standard deviations


def test_a_long_order_looks_random() -> None:
    num_samples = 100_000
    first, second = (np.array(order(num_samples, epoch=e), dtype=float) for e in (0, 1))
    place = np.arange(num_samples, dtype=float)
    four_deviations = 4 / math.sqrt(num_samples)
    for a, b in ((first, place), (first, second), (first[1:], first[:-1]), (second, place)):
        assert abs(np.corrcoef(a, b)[0, 1]) < four_deviations
    assert int((first == place).sum()) < 10  # one is expected, as in any random order
    gaps = np.histogram((first[1:] - first[:-1]) % num_samples, 50)[0]
    assert abs(gaps - num_samples / 50).max() < 5 * math.sqrt(num_samples / 50)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100


def test_batches_are_cut_from_the_position_to_the_end_of_the_epoch() -> None:
    short = SampleOrder(num_samples=10, batch_size=4)
    assert list(short.batches()) == [range(4), range(4, 8), range(8, 10)]
    assert list(short.batches(8)) == [range(8, 10)]
    assert (short.end, short.num_batches) == (10, 3)
    full = SampleOrder(num_samples=10, batch_size=4, drop_last=True)
    assert list(full.batches(4)) == [range(4, 8)]
    assert (full.end, full.num_batches) == (8, 2)


def test_samples_are_those_of_the_seed_and_the_epoch_or_in_order_of_position() -> None:
    mixed = SampleOrder(num_samples=10, batch_size=4, seed=1)
    assert mixed.samples(2, range(10)) == order(10, seed=1, epoch=2)
    plain = SampleOrder(num_samples=10, batch_size=4, shuffle=False)
    assert plain.samples(5, range(3, 6)) == [3, 4, 5]
    assert plain.samples(0, [7]) == [7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0; give a whole number >= 1"),
        ({"num_samples": 2.5}, "num_samples is 2.5"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**64}, "seed is 18446744073709551616; give a whole number <= "),
        ({"shuffle": 1}, "shuffle is 1; use one of True, False"),
        ({"drop_last": None}, "drop_last is None"),
        ({"drop_last": True, "batch_size": 11}, "10 samples make no batch of 11"),
    ],
)
def test_what_is_no_order_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SampleOrder(**{"num_samples": 10, "batch_size": 4, **options})
