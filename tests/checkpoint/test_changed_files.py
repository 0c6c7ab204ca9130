"""Files with something changed at random raise nothing but CheckpointCorrupt."""

import pytest

from echelon.checkpoint.format import Manifest
from echelon.checkpoint.header import read_header
from tests.checkpoint.mutations import HEADER, KINDS, MANIFEST, read_all


@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_refused_or_read_and_nothing_else(kind: str) -> None:
    count, refused = read_all(kind, 0, lambda count: count < 300)
    # Some changes leave a file that means something; most do not.
    assert 100 < refused < count


def test_what_is_changed_could_be_read_before() -> None:
    assert len(Manifest.parse(MANIFEST, "x").tensors) == 4
    assert len(read_header(HEADER, "x")) == 4
