"""Places in a store, and calls to it that end in time."""

from __future__ import annotations

import pickle

import fsspec
import pytest

from echelon.checkpoint.checksum import checksum
from echelon.checkpoint.store_path import StorePath, Upload
from echelon.errors import ArgumentError, CheckpointError
from tests.checkpoint.stores import objects, store

__all__ = ["store"]  # a fixture


def test_a_path_is_its_url_without_a_slash_at_the_end() -> None:
    path = StorePath("memory://bucket/runs/")
    assert path == StorePath("memory://bucket/runs") == StorePath("memory://bucket") / "runs"
    assert path != StorePath("memory://bucket")
    assert len({path, StorePath("memory://bucket/runs")}) == 1
    assert (path.parent, path.parent.parent) == (StorePath("memory://bucket"), path.parent)
    assert pickle.loads(pickle.dumps(path)) == path


@pytest.mark.parametrize("url", ["memory://", "memory:///", "://bucket", "Memory://bucket"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ArgumentError, match="give a path, or a URL such as"):
        StorePath(url)


def test_a_scheme_that_no_package_knows_is_refused() -> None:
    with pytest.raises(ArgumentError, match="no store of nosuch:// can be reached"):
        StorePath("nosuch://bucket")


def test_an_upload_is_what_was_written_to_it(store: str) -> None:
    path = StorePath(f"{store}/file")
    with Upload(path) as upload:
        upload.write(memoryview(b"some"))
        second = upload.write(memoryview(b"thing"))
    assert (upload.nbytes, objects(store)) == (9, {"file": b"something"})
    assert second == checksum(b"thing")


def test_a_file_is_created_once(store: str) -> None:
    path = StorePath(f"{store}/file")
    path.create(b"first")
    with pytest.raises(FileExistsError):
        path.create(b"second")
    assert path.read(1, 3) == b"ir"
    path.remove()
    path.remove()
    assert path.sizes() == {}


def test_sizes_are_by_the_path_from_there(store: str) -> None:
    system = fsspec.filesystem("memory")
    for name in ("a/b", "a/c/d", "a/c/e/f", "ab"):
        system.pipe_file(f"{store}/{name}", name.encode())
    path = StorePath(f"{store}/a")
    assert path.sizes() == {"b": 3}
    assert path.sizes(depth=2) == {"b": 3, "c/d": 5}
    assert StorePath(f"{store}/nothing").sizes(depth=2) == {}


def test_errors_of_a_store_are_ours_and_name_the_place(store: str) -> None:
    def fail(*_: object) -> None:
        raise PermissionError(13, "Forbidden")

    with pytest.raises(CheckpointError, match=f"{store}: PermissionError: .*Forbidden") as info:
        StorePath(store).call(fail)
    assert info.value.errno == 13
    with pytest.raises(PermissionError):
        StorePath(store).call(fail, PermissionError)
