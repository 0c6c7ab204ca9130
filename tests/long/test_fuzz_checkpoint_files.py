"""Ten minutes of changed files, and hostile ones as long as a file may be.

``ECHELON_FUZZ_S`` sets another number of seconds.
"""

import os
import random
import sys
import time
from pathlib import Path

import pytest

from echelon.checkpoint.format import Manifest
from echelon.checkpoint.header import read_header
from tests.checkpoint import hostile
from tests.checkpoint.manifests import many_pieces
from tests.checkpoint.mutations import KINDS, read_all

FUZZ_S = float(os.environ.get("ECHELON_FUZZ_S", "600"))
PARTS = 5  # of a kind, so that no test takes minutes
PARSE_S = 2.0

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is in /proc")


@pytest.mark.timeout(FUZZ_S / PARTS + 120)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KINDS)
def test_changed_files_are_refused_or_read_and_nothing_else(kind: str, part: int) -> None:
    seed = random.SystemRandom().randrange(2**60)
    end_s = time.monotonic() + FUZZ_S / len(KINDS) / PARTS
    count, refused = read_all(kind, seed, lambda _: time.monotonic() < end_s)
    assert 0 < refused < count
    print(f"{kind} from {seed} on: {count} read, {refused} of them refused")


@on_linux
@pytest.mark.parametrize("kind", hostile.manifests(Path()))
def test_a_hostile_manifest_of_100_mb_is_refused(kind: str) -> None:
    hostile.must_be_refused(Manifest.parse, hostile.manifests(Path())[kind]())


@on_linux
@pytest.mark.parametrize("kind", hostile.headers(Path()))
def test_a_hostile_header_of_100_mb_is_refused(kind: str) -> None:
    hostile.must_be_refused(read_header, hostile.headers(Path())[kind]())


def test_a_manifest_of_300_000_pieces_is_parsed_in_two_seconds() -> None:
    data = many_pieces(300, 1000).dump()
    times_s = []
    for _ in range(3):
        start_s = time.process_time()
        Manifest.parse(data, "x")
        times_s.append(time.process_time() - start_s)
    assert min(times_s) <= PARSE_S


def test_as_many_pieces_as_are_allowed_come_back() -> None:
    manifest = many_pieces(1000, 1000)
    assert Manifest.parse(manifest.dump(), "x") == manifest
