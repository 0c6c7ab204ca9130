"""The place that a user names: a folder on a disk, or a URL of an object store."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

from echelon.checkpoint import files, save_lock
from echelon.checkpoint.coordinator import named
from echelon.checkpoint.object_store import ObjectStore
from echelon.checkpoint.records import MANIFEST, Replaced, file_name, step_of
from echelon.checkpoint.step_storage import (
    FileInProgress,
    OpenFile,
    Place,
    StepStorage,
    refuse_steps,
)
from echelon.checkpoint.store_path import StorePath
from echelon.errors import ArgumentError

Folder = str | os.PathLike[str] | StorePath

_FILE_URL = "file://"
_BROKEN_URL = re.compile(r"[a-z][a-z0-9+.-]+:/[^/].*")


@final
class Disk(StepStorage[Path]):
    """Folders on a disk; ``files`` does the work."""

    max_open_files = 64  # a step of many ranks has more files than a process may open

    def steps(self, root: Path) -> list[int]:
        return files.steps(root)

    def is_step(self, folder: Path) -> bool:
        return folder.is_dir() and not folder.is_symlink()

    def open(self, path: Path, nbytes: int | None = None) -> OpenFile:
        return files.SavedBytes(path, nbytes)

    def check_entries(self, folder: Path, sizes: Mapping[str, int]) -> None:
        files.check_entries(folder, sizes)

    def prepare(self, root: Path, lock: ExitStack) -> None:
        real = Path(os.path.realpath(root))
        refuse_steps(
            folder
            for folder in (real, *real.parents)
            if step_of(folder.name) is not None and (folder / MANIFEST).exists()
        )
        files.make_folder(root)
        lock.enter_context(save_lock.lock(root))
        files.sweep(root)

    def holds(self, target: Path) -> bool:
        return target.is_symlink() or target.exists()

    def make_temporary(self, root: Path, step: int, replaced: Replaced) -> Path:
        return files.make_temporary(root, step)

    def writers(self, root: Path) -> list[str]:
        return files.writers(root)

    def claim(self, root: Path, writer: str) -> None:
        files.claim(root, writer)

    def others(self, folder: Path) -> list[str]:
        return files.others(folder)

    def file_name(self, rank: int) -> str:
        return file_name(rank)

    def create(self, path: Path) -> FileInProgress:
        return files.NewFile(path)

    def commit(
        self, temporary: Path, target: Path, manifest: bytes, sizes: Mapping[str, int],
        replaced: Replaced
    ) -> None:  # fmt: skip
        files.write_file(temporary / MANIFEST, manifest)
        files.commit(temporary, target, replaced)

    def discard(self, temporary: Path) -> None:
        files.discard(temporary)

    def remove_steps(self, folders: Sequence[Path]) -> None:
        files.remove_steps(folders)


_DISK = Disk()
_OBJECT_STORE = ObjectStore()


def storage_of(place: Place) -> StepStorage[Any]:
    """The kind of place that ``place`` is in."""
    return _OBJECT_STORE if isinstance(place, StorePath) else _DISK


def place_of(directory: Folder) -> Place:
    """The place that a user names.

    Raises:
        ArgumentError: it is neither a path nor the URL of a store.
    """
    if isinstance(directory, StorePath):
        return directory
    path = os.fspath(directory) if isinstance(directory, str | os.PathLike) else None
    if isinstance(path, str) and path.startswith(_FILE_URL):
        path = path.removeprefix(_FILE_URL)
    if isinstance(path, str) and "://" in path:
        return StorePath(path)
    if isinstance(directory, os.PathLike) and isinstance(path, str) and _BROKEN_URL.fullmatch(path):
        raise ArgumentError(f"directory is {directory!r}; give a URL as a string, not as a Path")
    try:
        if isinstance(path, str) and path and b"\0" not in os.fsencode(path):
            return Path(os.path.abspath(path))
    except UnicodeEncodeError:
        pass  # no file can have this name
    except OSError as error:  # there is no current folder any more
        raise named(error, None) from error
    raise ArgumentError(f"directory is {directory!r:.80}; give the path of a folder")
