"""What a user may name as the place of checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.checkpoint.object_store import ObjectStore
from echelon.checkpoint.place import Disk, place_of, storage_of
from echelon.checkpoint.store_path import StorePath
from echelon.errors import ArgumentError


def test_a_path_is_on_the_disk_and_a_url_in_a_store() -> None:
    assert place_of("runs/a") == place_of(Path("runs/a")) == Path(os.getcwd(), "runs/a")
    assert place_of("file:///runs/a") == Path("/runs/a")
    assert place_of("memory://bucket/a") == StorePath("memory://bucket/a")
    assert place_of(StorePath("memory://bucket")) == StorePath("memory://bucket")
    assert type(storage_of(place_of("runs/a"))) is Disk
    assert type(storage_of(place_of("memory://bucket"))) is ObjectStore


@pytest.mark.parametrize("directory", ["", "a\0b", "\ud800", 3, None, b"runs"])
def test_what_names_no_place_is_refused(directory: object) -> None:
    with pytest.raises(ArgumentError, match="give the path of a folder"):
        place_of(directory)  # type: ignore[arg-type]


def test_a_url_that_a_path_has_broken_is_refused() -> None:
    with pytest.raises(ArgumentError, match="give a URL as a string, not as a Path"):
        place_of(Path("s3://bucket/runs"))
