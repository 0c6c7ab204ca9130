"""Mixtures: proportions, epochs of each source, and resumption."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import echelon as ec
from tests.train.test_source_cursor import Numbers, Seekable


def mixture_of(seed: int = 0) -> ec.Mixture:
    sources: dict[str, Any] = {
        "a": Seekable(7),
        "b": lambda epoch: [f"b{epoch} {i}" for i in range(3)],
        "c": ["c"],
    }
    return ec.Mixture(sources, {"a": 2, "b": 1, "c": 0.5}, seed=seed)


@given(st.integers(0, 60), st.integers(0, 3))
def test_a_mixture_with_the_state_of_another_goes_on_as_that_does(position: int, seed: int) -> None:
    mixture, other = mixture_of(seed), mixture_of(seed)
    whole = list(islice(mixture_of(seed), position + 30))
    assert list(islice(mixture, position)) == whole[:position]
    other.load_state_dict(mixture.state_dict())
    assert other.epochs == mixture.epochs
    assert list(islice(other, 30)) == whole[position:]
    assert list(islice(mixture, 30)) == whole[position:]


@pytest.mark.slow
def test_samples_have_the_proportions_of_the_weights() -> None:
    counts = Counter(islice(ec.Mixture({"a": ["a"], "b": ["b"]}, {"a": 3, "b": 1}), 20_000))
    # The standard deviation of a count is 61.
    assert abs(counts["a"] - 15_000) < 250
    even = Counter(islice(ec.Mixture({"a": ["a"], "b": ["b"]}), 20_000))
    assert abs(even["a"] - 10_000) < 300


def test_each_source_is_read_in_its_order_and_has_epochs_of_its_own() -> None:
    mixture = mixture_of()
    samples = list(islice(mixture, 70))
    numbers = [sample for sample in samples if isinstance(sample, int)]
    epochs = [100 * epoch + i for epoch in range(20) for i in range(7)]
    assert numbers == epochs[: len(numbers)]
    texts = [s for s in samples if isinstance(s, str) and s != "c"]
    assert texts == [f"b{epoch} {i}" for epoch in range(20) for i in range(3)][: len(texts)]
    assert mixture.epochs["c"] > mixture.epochs["a"] > 1


def test_seeds_give_other_orders_and_a_weight_of_zero_nothing() -> None:
    assert list(islice(mixture_of(0), 20)) != list(islice(mixture_of(1), 20))
    only = ec.Mixture({"a": ["a"], "b": ["b"]}, {"a": 0, "b": 1})
    assert set(islice(only, 100)) == {"b"}


def test_ranks_read_one_mixture(tmp_path: Any) -> None:
    whole = list(islice(mixture_of(), 12))
    streams = [ec.SampleStream(mixture_of(), 6, (r, 3), collate=list) for r in range(3)]
    assert [sample for s in streams for sample in next(s.batches(None))] == whole[:6]
    ec.save(tmp_path, step=1, stream=streams[0])
    later = ec.SampleStream(mixture_of(), 6, (0, 1), collate=list)
    ec.load(tmp_path, stream=later)
    assert next(later.batches(None)) == whole[6:]


@pytest.mark.parametrize(
    ("sources", "weights", "message"),
    [
        ({}, None, "give a dict of sources by name"),
        ({"a": [1]}, {"b": 1}, r"weights are of \['b'\], and sources \['a'\]"),
        ({"a": [1]}, {"a": -1}, "weight of 'a' is -1; it must be a number of at least 0"),
        ({"a": [1]}, {"a": 0}, "give some that are not 0"),
        ({"a": [1]}, {"a": float("nan")}, "weight of 'a' is nan"),
        ({"a": iter([1])}, None, "a is a list_iterator, which can be read only once"),
    ],
)
def test_what_is_no_mixture_is_refused(sources: Any, weights: Any, message: str) -> None:
    with pytest.raises(ec.ArgumentError, match=message):
        ec.Mixture(sources, weights)


def test_states_of_other_mixtures_are_refused() -> None:
    mixture = mixture_of()
    with pytest.raises(ec.ArgumentError, match="seed of the mixture: 1 in the state and 0 here"):
        mixture.load_state_dict(mixture_of(1).state_dict())
    other = ec.Mixture({"a": Numbers(3)})
    with pytest.raises(ec.ArgumentError, match="weights of the mixture"):
        mixture.load_state_dict(other.state_dict())
    with pytest.raises(ec.ArgumentError, match="give what state_dict"):
        mixture.load_state_dict({})


def test_an_empty_source_is_an_error() -> None:
    with pytest.raises(ec.StateError, match="source 'a' of the mixture has no sample"):
        next(iter(ec.Mixture({"a": []})))
