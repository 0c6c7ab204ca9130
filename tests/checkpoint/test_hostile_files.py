"""Files that somebody made to do harm are refused in two seconds and 200 MB."""

import pickle
import sys
from pathlib import Path

import pytest

from echelon.checkpoint.format import Manifest
from echelon.checkpoint.header import read_header
from tests.checkpoint import hostile

SMALL = 1_000_000  # bytes; tests/long has the same with all that a file may have
UNUSED = Path()

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is in /proc")


@pytest.mark.parametrize("kind", hostile.manifests(UNUSED))
def test_a_hostile_manifest_is_refused_soon_and_without_much_memory(
    kind: str, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    hostile.must_be_refused(Manifest.parse, hostile.manifests(canary, SMALL)[kind]())
    assert not canary.exists()


@pytest.mark.parametrize("kind", hostile.headers(UNUSED))
def test_a_hostile_header_is_refused_soon_and_without_much_memory(
    kind: str, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    hostile.must_be_refused(read_header, hostile.headers(canary, SMALL)[kind]())
    assert not canary.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["many lists", "a long number"])
def test_what_has_all_the_bytes_that_are_allowed_is_refused_as_soon(kind: str) -> None:
    hostile.must_be_refused(Manifest.parse, hostile.manifests(UNUSED)[kind]())
    hostile.must_be_refused(read_header, hostile.headers(UNUSED)[kind]())


def test_the_pickles_among_these_files_would_do_harm(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    pickle.loads(hostile.manifests(canary, SMALL)["a pickle"]())
    assert canary.exists()


@pytest.mark.slow
def test_what_a_call_takes_in_memory_is_seen() -> None:
    assert hostile.cost_of(lambda: len(bytearray(b"a") * 300_000_000)).nbytes >= 290_000_000
