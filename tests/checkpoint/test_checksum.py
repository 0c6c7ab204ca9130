"""Checksums are XXH3-64, of bytes at once or in parts."""

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from echelon.checkpoint.checksum import Checksum, are_checksums, checksum, is_checksum


def test_the_checksum_is_the_published_one() -> None:
    # From the test vectors of xxHash: seed 0, of nothing.
    assert checksum(b"") == "2d06800538d394c2"
    assert checksum(b"abc") == xxhash.xxh3_64(b"abc", seed=0).hexdigest()


@given(st.lists(st.binary(max_size=300)))
def test_parts_have_the_checksum_of_the_whole(parts: list[bytes]) -> None:
    sums = Checksum()
    for part in parts:
        sums.update(memoryview(part))
    assert sums.hexdigest() == checksum(b"".join(parts))
    assert is_checksum(sums.hexdigest())


def test_the_memory_of_a_tensor_is_read_in_place() -> None:
    values = torch.arange(1000, dtype=torch.float64)
    view = memoryview(values.numpy()).cast("B")
    assert checksum(view) == checksum(values.numpy().tobytes())
    before = checksum(view)
    values[999] += 1
    assert checksum(view) != before


@pytest.mark.parametrize(
    "found", ["", "0" * 15, "0" * 17, "0" * 15 + "A", "0" * 15 + "g", 0, None, b"0" * 16, "٠" * 16]
)
def test_another_form_is_no_checksum(found: object) -> None:
    assert not is_checksum(found)
    assert not are_checksums(["0" * 16, found])
