"""JSON of unknown origin: what is read is what Python reads, and what is harmful is not read."""

import json
import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ArgumentError, CheckpointCorrupt
from echelon.values import untrusted_json
from echelon.values.untrusted_json import MAX_JSON_DEPTH, brief, read_json, write_json
from tests.checkpoint.manifests import JSON

MEMORY = 2**20


@pytest.mark.slow
@given(JSON, st.booleans(), st.sampled_from([None, 1]))
def test_any_json_is_read_as_it_was_written(value: Any, ascii_only: bool, indent: Any) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    found = read_json(text.encode(), "x", memory=MEMORY)
    assert repr(found) == repr(value)  # 1, 1.0 and True are equal, and -0.0 is 0.0


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_what_is_written_is_the_shortest_ascii(value: dict[str, Any]) -> None:
    data = write_json(value, "it")
    assert data.isascii()
    assert data == json.dumps(value, separators=(",", ":")).encode()


@given(st.text(st.sampled_from('\\"[]{},:ux')), st.integers(0, 200))
def test_brackets_in_strings_are_no_nesting(text: str, shift: int) -> None:
    # The strings cross the parts in which the text is looked at in every way.
    value = ["x" * (2**16 - 100 + shift), text * 50, "[" * 1000, text]
    data = json.dumps(value).encode()
    assert read_json(data, "x", memory=MEMORY) == value


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


# Just below and just above what is allowed, and strings that look like it.
NEAR_LIMITS = st.one_of(
    st.integers(38, 43).map(lambda digits: b"1" * digits),
    st.integers(253, 257).map(nested),
    st.integers(0, 50).map(lambda num_spaces: b" " * num_spaces + b"0"),
    st.text(st.sampled_from('\\"[]{},:.ux1 é'), max_size=60).map(
        lambda text: json.dumps(text).encode()
    ),
    st.sampled_from([b"[", b'"', b"\\", b"1" * 30]),
)


@pytest.mark.slow
@given(st.lists(NEAR_LIMITS, min_size=1, max_size=4), st.integers(1, 70))
def test_the_same_is_read_and_refused_wherever_a_chunk_ends(
    values: list[bytes], chunk_nbytes: int
) -> None:
    def outcome(nbytes: int) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(untrusted_json, "_CHUNK_NBYTES", nbytes)
            try:
                return repr(read_json(b"[" + b",".join(values) + b"]", "x", memory=MEMORY))
            except CheckpointCorrupt:
                return "refused"  # for the first reason that is found, of several

    assert outcome(chunk_nbytes) == outcome(2**16)


def test_reading_json_imports_neither_torch_nor_numpy() -> None:
    program = """
import sys
from echelon.values.untrusted_json import read_json
read_json(b"{}", "x", memory=2**20)
assert not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_nesting_is_allowed_up_to_the_limit() -> None:
    found: Any = read_json(nested(MAX_JSON_DEPTH), "x", memory=MEMORY)
    for _ in range(MAX_JSON_DEPTH - 1):
        (found,) = found
    assert found == []
    wide = b"[" + b",".join([nested(MAX_JSON_DEPTH - 1)] * 300) + b"]"
    assert len(read_json(wide, "x", memory=2**24)) == 300  # type: ignore[arg-type]
    for data in (
        nested(MAX_JSON_DEPTH + 1),
        b"[" * (MAX_JSON_DEPTH + 1),
        b'{"a":' * (MAX_JSON_DEPTH + 1),
    ):
        with pytest.raises(CheckpointCorrupt, match="more than 256 deep"):
            read_json(data, "x", memory=MEMORY)


@pytest.mark.parametrize("item", [b"[]", b"{}", b"0", b'"ab"', b"1.5", b'{"a":0}', b"1000", b"[0]"])
def test_what_would_take_more_memory_than_allowed_is_refused(item: bytes) -> None:
    data = b"[" + b",".join([item] * 100_000) + b"]"
    with pytest.raises(CheckpointCorrupt, match="more than 4 MiB of memory"):
        read_json(data, "x", memory=2**22)
    assert len(read_json(data, "x", memory=2**27)) == 100_000  # type: ignore[arg-type]


def test_records_may_take_more_and_nothing_else_may() -> None:
    records = json.dumps([[1, 2, 3, 4, "a"]] * 10_000).encode()
    assert len(read_json(records, "x", memory=2**20, max_records=10_000)) == 10_000  # type: ignore[arg-type]
    numbers = json.dumps([1] * 50_000).encode()
    for data, max_records in ((records, 0), (records, 5000), (numbers, 10_000)):
        with pytest.raises(CheckpointCorrupt, match="more than 1 MiB of memory"):
            read_json(data, "x", memory=2**20, max_records=max_records)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no JSON"),
        (b"[", "no JSON"),
        (b"]", "no JSON"),
        (b"[1,]", "no JSON"),
        (b"'a'", "no JSON"),
        (b"[1] 2", "no JSON"),
        (b'"\n"', "no JSON"),
        (b'"\\x"', "no JSON"),
        (b"\\", "no JSON"),
        (b"\\" * 70_000, "no JSON"),
        (b"01", "no JSON"),
        (b"// 1", "no JSON"),
        (b"\xef\xbb\xbf1", "no JSON"),
        (b"1\0", "no JSON"),
        ("[1]".encode("utf-16"), "no UTF-8 at byte 0"),
        (b'"\xff"', "no UTF-8 at byte 1"),
        (b'"\xed\xa0\x80"', "no UTF-8 at byte 1"),
        (b"NaN", "NaN is no number"),
        (b"[Infinity]", "Infinity is no number"),
        (b"1e400", "1e400"),
        (b"0." + b"1" * 100, "more than 40 characters"),
        (b"1" * 41, "number of more than 40 characters"),
        (b"[-" + b"9" * 10**6, "number of more than 40 characters"),
        (b'{"a":1,"b":2,"a":3}', "the key 'a' is there twice"),
    ],
)
def test_what_is_no_strict_json_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=message) as caught:
        read_json(data, "a/file", memory=MEMORY)
    assert caught.value.path == "a/file"
    assert len(str(caught.value)) < 200


def test_the_error_does_not_keep_the_text_alive() -> None:
    with pytest.raises(CheckpointCorrupt) as caught:
        read_json(b"[1,]", "x", memory=MEMORY)
    assert caught.value.__context__ is None


def test_spaces_between_values_are_allowed_up_to_the_limit() -> None:
    spaces = b" \t\r\n" * 2**18
    assert read_json(b"[1," + spaces + b'"' + b" " * 2**20 + b'"]', "x", memory=2**24)
    with pytest.raises(CheckpointCorrupt, match="more than 1048576 spaces between its values"):
        read_json(b"[1, " + spaces + b"2]", "x", memory=2**24)


@pytest.mark.parametrize("value", [math.nan, math.inf, b"x", 2 + 1j, {1, 2}], ids=repr)
def test_what_has_no_json_is_not_written(value: object) -> None:
    with pytest.raises(ArgumentError, match="it cannot be written as JSON"):
        write_json({"a": value}, "it")


def test_what_was_found_is_described_in_a_few_words() -> None:
    assert brief({"a": 1}) == "an object of 1 members"
    assert brief([[]] * 10**6) == "an array of 1000000 values"
    assert brief("x" * 10**6) == repr("x" * 77 + "...")
    assert [brief(one) for one in (None, True, 1.0, "a")] == ["None", "True", "1.0", "'a'"]
