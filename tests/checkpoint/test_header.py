"""Headers: safetensors reads ours, we read its own, and nothing else is one."""

import json
from math import prod
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from echelon.checkpoint.header import Entry, header, header_nbytes, key_of, read_header
from echelon.errors import ArgumentError, CheckpointCorrupt
from echelon.values.value_types import DTYPES, FILE_DTYPES
from tests.checkpoint.manifests import NAMES

ENTRIES: list[Entry] = [
    ("weight", "F32", (2, 3), 24),
    ("bias[0:2]", "BF16", (2,), 4),
    ("empty", "I64", (0, 4), 0),
    ("number", "F64", (), 8),
]
GOOD = header(ENTRIES)


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    found = []
    for key in draw(st.lists(NAMES, unique=True, max_size=5)):
        dtype = draw(st.sampled_from(sorted(FILE_DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
        found.append((key, dtype, shape, prod(shape) * DTYPES[dtype].itemsize))
    return found


@pytest.mark.slow
@given(entries())
def test_a_header_is_read_as_it_was_written(given_entries: list[Entry]) -> None:
    data = header(given_entries)
    assert len(data) % 64 == 0
    assert header_nbytes(data[:8], "x") == len(data)
    # Those without elements lie where the next one begins, and come before it.
    found = read_header(data, "x")
    assert sorted(found) == sorted(given_entries)
    assert [one for one in found if one[3]] == [one for one in given_entries if one[3]]


@pytest.mark.parametrize("name", sorted(FILE_DTYPES))
def test_safetensors_reads_what_is_written_in_every_dtype(name: str) -> None:
    dtype = DTYPES[name]
    values = torch.arange(10 * dtype.itemsize, dtype=torch.uint8) % 2
    first, second = values.view(dtype)[:6].view(2, 3), values.view(dtype)[6:]
    written = [
        (key_of("a", (2, 3), 0, 6), name, (2, 3), 6 * dtype.itemsize),
        (key_of("b", (10,), 6, 4), name, (4,), 4 * dtype.itemsize),
    ]
    found = safetensors.torch.load(header(written) + values.numpy().tobytes())
    assert found.keys() == {"a", "b[6:10]"}
    for expected, key in ((first, "a"), (second, "b[6:10]")):
        assert found[key].dtype == dtype
        assert found[key].shape == expected.shape
        assert torch.equal(found[key].view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.slow
@given(entries())
def test_safetensors_reads_what_is_written_in_any_order(given_entries: list[Entry]) -> None:
    data = header(given_entries) + bytes(sum(nbytes for *_, nbytes in given_entries))
    found = safetensors.torch.load(data)
    assert {key: (one.dtype, tuple(one.shape)) for key, one in found.items()} == {
        key: (DTYPES[dtype], shape) for key, dtype, shape, _ in given_entries
    }


@pytest.mark.slow
@given(entries())
def test_what_safetensors_writes_is_read(given_entries: list[Entry]) -> None:
    tensors = {
        key: torch.zeros(shape, dtype=DTYPES[dtype]) for key, dtype, shape, _ in given_entries
    }
    data = safetensors.torch.save(tensors, metadata={"format": "pt", "made by": "a test"})
    found = read_header(data, "x")
    assert sorted(found) == sorted(given_entries)
    assert header_nbytes(data, "x") + sum(nbytes for *_, nbytes in found) == len(data)


@given(NAMES, st.lists(st.integers(0, 4), max_size=2), st.data())
def test_different_ranges_have_different_keys(name: str, shape: list[int], data: Any) -> None:
    numel = prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    key = key_of(name, shape, start, stop - start)
    if stop - start == numel:
        assert key == name
    else:
        assert key == f"{name}[{start}:{stop}]"
        # A tensor that has this very name has another key.
        assert key_of(key, shape, 0, numel) == f"{key}[0:{numel}]"


def test_a_name_that_is_reserved_is_never_a_key() -> None:
    assert key_of("__metadata__", (2,), 0, 2) == "__metadata__[0:2]"
    with pytest.raises(ArgumentError, match="__metadata__"):
        header([("__metadata__", "F32", (1,), 4)])


@pytest.mark.parametrize(
    ("given_entries", "message"),
    [
        ([("a", "F32", (1,), 4), ("a", "F32", (1,), 4)], "^two tensors .* are named 'a'$"),
        ([("a", "F32", (2,), 4)], r"4 bytes are no F32 of shape \(2,\)"),
        ([("a", "F99", (1,), 4)], "4 bytes are no F99"),
        ([("", "F32", (1,), 4)], "cannot be named '': a name has 1 to"),
        ([("a\0", "F32", (1,), 4)], r"cannot be named 'a\\x00': a name has 1 to"),
        ([("__metadata__", "F32", (1,), 4)], "cannot be named '__metadata__': .* and is not"),
    ],
)
def test_a_header_that_nobody_could_read_is_not_written(
    given_entries: list[Entry], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        header(given_entries)


def _written(members: Any, padding: bytes = b"") -> bytes:
    text = members if isinstance(members, bytes) else json.dumps(members).encode()
    return len(text + padding).to_bytes(8, "little") + text + padding


def _entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "would have 0 bytes"),
    "seven bytes": (bytes(7), "would have 0 bytes"),
    "length 0": (bytes(100), "would have 0 bytes"),
    "length 2**63": (b"\0" * 7 + b"\x80{}", "would have 9223372036854775808 bytes"),
    "length over 100 MB": ((10**8 + 1).to_bytes(8, "little"), "would have"),
    "cut": (GOOD[:-1], "ends in its header"),
    "array": (_written([]), "does not begin as one"),
    "space first": (_written(b" {}"), "does not begin as one"),
    "no JSON": (_written(b"{}}"), "no JSON"),
    "NUL after it": (_written({}, b"\0"), "no JSON"),
    "key twice": (_written(b'{"a":1,"a":2}'), "'a' is there twice"),
    "metadata array": (_written({"__metadata__": []}), "and not strings"),
    "metadata number": (_written({"__metadata__": {"a": 1}}), "and not strings"),
    "entry null": (_written({"a": None}), "its entry is None"),
    "entry with more": (_written({"a": _entry() | {"more": 1}}), "its entry is an object"),
    "entry with less": (_written({"a": {"dtype": "F32", "shape": []}}), "its entry is an object"),
    "name empty": (_written({"": _entry()}), "is named ''"),
    "name NUL": (_written({"a\0": _entry()}), "is named"),
    "name long": (_written({"a" * 2000: _entry()}), "is named"),
    "dtype unknown": (_written({"a": _entry("F4")}), "dtype 'F4' is not known"),
    "dtype null": (_written({"a": _entry(None)}), "dtype None is not known"),
    "shape number": (_written({"a": _entry(shape=2)}), "its shape is 2"),
    "shape true": (_written({"a": _entry(shape=[True, 2])}), "is none"),
    "shape negative": (_written({"a": _entry(shape=[-2, -1])}), "is none"),
    "shape of 1e18": (_written({"a": _entry(shape=[10**18])}), "too many elements"),
    "shape that overflows": (_written({"a": _entry(shape=[2**32, 2**32, 1])}), "too many elements"),
    "shape of 0 x 1e18": (_written({"a": _entry(shape=[0, 10**18], offsets=[0, 0])}), "too many"),
    "shape of 65 dims": (_written({"a": _entry(shape=[1] * 65)}), "is none"),
    "offsets number": (_written({"a": _entry(offsets=8)}), "its place is 8"),
    "offsets of one": (_written({"a": _entry(offsets=[8])}), "its place is an array"),
    "offsets reversed": (_written({"a": _entry(offsets=[8, 0])}), "its place is 8 to 0"),
    "offsets negative": (_written({"a": _entry(offsets=[-8, 0])}), "its place is an array"),
    "offsets float": (_written({"a": _entry(offsets=[0, 8.0])}), "its place is an array"),
    "offsets of 1e18": (_written({"a": _entry(offsets=[0, 10**18])}), "and it has 8 bytes"),
    "offsets short": (_written({"a": _entry(offsets=[0, 7])}), "and it has 8 bytes"),
    "hole": (_written({"a": _entry(), "b": _entry(offsets=[9, 17])}), "leaves bytes out"),
    "hole first": (_written({"a": _entry(offsets=[8, 16])}), "leaves bytes out"),
    "overlap": (_written({"a": _entry(), "b": _entry(offsets=[7, 15])}), "overlaps"),
    "same place": (_written({"a": _entry(), "b": _entry()}), "overlaps"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_header_is_refused_with_what_is_wrong(kind: str) -> None:
    data, message = BROKEN[kind]
    with pytest.raises(CheckpointCorrupt, match=message) as caught:
        read_header(data, "a/file.safetensors")
    assert caught.value.path == "a/file.safetensors"


def test_the_order_of_members_and_the_padding_are_free() -> None:
    first, second = _entry(offsets=[8, 16]), _entry(offsets=[0, 8])
    data = _written({"b": first, "a": second}, b"   \n")
    assert [key for key, *_ in read_header(data, "x")] == ["a", "b"]


def test_data_after_the_header_are_not_looked_at() -> None:
    assert read_header(GOOD + b"\xff" * 100, "x") == read_header(GOOD, "x")


@pytest.mark.parametrize("kind", BROKEN)
def test_no_header_that_safetensors_refuses_is_read_here(kind: str) -> None:
    # The other way round it need not be: safetensors takes a name twice, for one.
    data = BROKEN[kind][0] + bytes(8)
    try:
        safetensors.torch.load(data)
    except Exception:  # whatever it is
        with pytest.raises(CheckpointCorrupt):
            read_header(data, "x")
