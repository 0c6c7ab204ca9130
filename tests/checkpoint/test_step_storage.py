"""What disks and stores have in common: how a manifest is read."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from echelon.checkpoint import step_storage
from echelon.checkpoint.place import place_of, storage_of
from echelon.errors import CheckpointCorrupt
from tests.checkpoint.stores import store

__all__ = ["store"]  # a fixture


@pytest.mark.parametrize("is_store", [False, True])
def test_a_manifest_that_is_too_large_is_not_read(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_store: bool
) -> None:
    url = store if is_store else f"file://{tmp_path}"
    place = place_of(url)
    with pytest.raises(CheckpointCorrupt, match="the file is not there"):
        storage_of(place).read_manifest(place)
    fsspec.open(f"{url}/manifest.json", "wb").open().close()
    with fsspec.open(f"{url}/manifest.json", "wb") as file:
        file.write(b"123456789")
    assert storage_of(place).read_manifest(place) == b"123456789"
    monkeypatch.setattr(step_storage, "MAX_MANIFEST_NBYTES", 8)
    with pytest.raises(CheckpointCorrupt, match="has 9 bytes, too many for a manifest"):
        storage_of(place).read_manifest(place)
