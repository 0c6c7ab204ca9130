"""Nested values whose arrays lie in a memory that several processes map."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st

from echelon.errors import ArgumentError, SharedMemoryError
from echelon.train import mapped_values
from echelon.train.mapped_values import MappedValues, SharedColumn

LEAVES = st.one_of(
    st.none(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.binary(max_size=5),
    np_st.arrays(
        st.sampled_from(["f4", "i8", "?", "c16", "M8[ms]", "S3", "U2", ">i2"]),
        np_st.array_shapes(min_dims=0, min_side=0, max_side=3),
    ),
    st.builds(
        lambda shape, dtype: torch.arange(int(np.prod(shape))).reshape(shape).to(dtype),
        st.tuples(st.integers(0, 3), st.integers(0, 3)),
        st.sampled_from([torch.bfloat16, torch.bool, torch.float8_e4m3fn, torch.complex64]),
    ),
    st.lists(st.text(max_size=3), max_size=4),
    st.lists(st.binary(max_size=3), max_size=4),
)
VALUES = st.recursive(
    LEAVES,
    lambda inside: st.one_of(
        st.lists(inside, max_size=3),
        st.tuples(inside, inside),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 9)), inside, max_size=3),
    ),
    max_leaves=6,
)


def check_equal(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()
    elif isinstance(expected, np.ndarray):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.tobytes() == expected.tobytes()
    elif isinstance(expected, dict):
        assert [*actual] == [*expected]
        for key, value in expected.items():
            check_equal(actual[key], value)
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        assert isinstance(actual, SharedColumn) or type(actual) is type(expected)
        for item, value in zip(actual, expected, strict=True):
            check_equal(item, value)
    else:
        assert type(actual) is type(expected)
        assert actual == expected


@pytest.mark.slow
@settings(max_examples=150)
@given(VALUES)
def test_what_is_mapped_equals_what_was_put_in(value: Any) -> None:
    with MappedValues() as here, MappedValues() as there:
        here.fill(value)
        assert here.description is not None
        there.map(here.description)
    check_equal(here.value, value)
    check_equal(there.value, value)


def test_a_write_to_an_array_raises_and_one_to_a_tensor_stays_here() -> None:
    with MappedValues() as here, MappedValues() as there:
        here.fill({"array": np.arange(3), "tensor": torch.arange(3)})
        assert here.description is not None
        there.map(here.description)
    with pytest.raises(ValueError, match="read-only"):
        here.value["array"][0] = 7
    here.value["tensor"][0] = 7
    assert here.value["tensor"].tolist() == [7, 1, 2]
    assert there.value["tensor"].tolist() == [0, 1, 2]


def test_the_memory_is_mapped_and_not_copied_and_ends_with_its_values() -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    with MappedValues() as memory:
        memory.fill({"tensor": torch.zeros(1 << 20), "array": np.zeros(1 << 18)})
    maps = Path("/proc/self/maps").read_text()
    assert "memfd:echelon-data" in maps
    tensor = memory.value["tensor"]
    assert tensor.data_ptr() % 64 == 0
    memory.value = None
    assert "memfd:echelon-data" in Path("/proc/self/maps").read_text()  # of the tensor
    del tensor
    assert "memfd:echelon-data" not in Path("/proc/self/maps").read_text()
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_column_is_a_sequence() -> None:
    texts = ["a", "", "bé", "\udc80", "😀"]
    with MappedValues() as memory:
        memory.fill((texts, [b"\0", b""]))
    column, data = memory.value
    assert list(column) == texts
    assert column[-1] == "😀"
    assert column[1:4] == texts[1:4]
    assert column.index("bé") == 2
    assert list(data) == [b"\0", b""]
    with pytest.raises(IndexError):
        column[5]
    assert repr(column) == "SharedColumn of 5 str"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [torch.nn.Linear(1, 1)]}, r"the data\['a'\]\[0\] is a Linear, which cannot be"),
        (np.array([object()]), "the data is an array of object"),
        (np.zeros(2, "i4,f4"), "the data is an array of"),
        (torch.ones(2).to_sparse(), "a tensor of layout torch.sparse_coo"),
        ((torch.ones(1, device="meta"),), r"the data\[0\] is a tensor .* on meta"),
        ({1, 2}, "the data is a set"),
    ],
)
def test_what_cannot_be_shared_is_named(value: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message), MappedValues() as memory:
        memory.fill(value)


def test_endless_nesting_is_refused() -> None:
    value: list[Any] = [torch.ones(1)]
    value.append(value)
    with (
        pytest.raises(ArgumentError, match="is nested more than 20 deep"),
        MappedValues() as memory,
    ):
        memory.fill(value)


def test_too_little_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mapped_values.os, "pwrite", full)
    with pytest.raises(SharedMemoryError, match="a shared data set"), MappedValues() as memory:
        memory.fill(torch.ones(3))


def test_simulated_ranks_share_a_file_where_there_are_no_memfds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with MappedValues() as here, MappedValues() as there:
        here.fill(torch.arange(3))
        assert here.description is not None
        there.map(here.description)
    assert there.value.tolist() == [0, 1, 2]
