"""Files with something changed at random raise nothing but CheckpointCorrupt."""

import json
import random
from typing import Any

import pytest

from echelon.checkpoint.format import Manifest
from echelon.checkpoint.header import header, header_nbytes, read_header
from echelon.errors import CheckpointCorrupt, CheckpointTooNew
from tests.checkpoint.manifests import sealed
from tests.checkpoint.mutations import HEADER, KINDS, MANIFEST, read_all, with_values_changed


@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_refused_or_read_and_nothing_else(kind: str) -> None:
    count, refused = read_all(kind, 0, lambda count: count < 300)
    # Some changes leave a file that means something; most do not.
    assert 100 < refused < count


def test_what_is_changed_could_be_read_before() -> None:
    assert len(Manifest.parse(MANIFEST, "x").tensors) == 4
    assert len(read_header(HEADER, "x")) == 4


def facts(text: bytes, *free: str) -> str:
    """The values of a JSON object with their types, without members that may differ."""
    return json.dumps({**json.loads(text), **dict.fromkeys(free)}, sort_keys=True)


@pytest.mark.slow
def test_what_is_read_of_any_file_is_all_that_it_says() -> None:
    """Law: what has been decoded is encoded again with the same values."""
    count = 0
    for seed in range(150):
        rng = random.Random(seed)
        members: Any = json.loads(MANIFEST)
        del members["checksum"]
        with_values_changed(members[rng.choice(["sections", "world", "versions"])], rng)
        reordered = dict(rng.sample([*members.items()], len(members)))
        edited = sealed(json.dumps(reordered, separators=(",", ":")).encode()[1:])
        for data in (edited, KINDS["manifests"][0](random.Random(seed))):
            try:
                written = Manifest.parse(data, "x").dump()
            except (CheckpointCorrupt, CheckpointTooNew):
                continue
            assert facts(written, "schema", "checksum") == facts(data, "schema", "checksum")
            count += 1
        data = KINDS["headers"][0](random.Random(seed))
        try:
            entries = read_header(data, "x")
        except CheckpointCorrupt:
            continue
        text = data[8 : header_nbytes(data, "x")]
        assert facts(header(entries)[8:], "__metadata__") == facts(text, "__metadata__")
        count += 1
    assert count > 100
