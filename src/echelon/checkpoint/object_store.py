"""Checkpoints in an object store: the manifest of a step is written last, and removed first."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import final

from echelon.checkpoint.records import (
    MANIFEST,
    WRITTEN_BY,
    Replaced,
    file_name,
    is_file_name,
    step_name,
    step_of,
)
from echelon.checkpoint.step_storage import FileInProgress, OpenFile, StepStorage, refuse_steps
from echelon.checkpoint.store_path import StorePath, Upload
from echelon.errors import CheckpointCorrupt, CheckpointError

_BLOCK_NBYTES = 8 << 20  # a store takes some 50 ms for each call, however little it reads


@final
class ObjectStore(StepStorage[StorePath]):
    """Objects under a prefix of an object store.

    A store has no lock that ends with its holder, so two jobs that save into one run at the same
    time are not refused. They cannot make a step of files of both: the manifest is created only
    where there is none, and only if the files have the sizes that it says; their bytes are compared
    with its checksums at each load. Each save gives its files names of their own, so that an upload
    that was given up, and arrives later, replaces nothing.
    """

    max_open_files = 16  # each has a block in memory

    def steps(self, root: StorePath) -> list[int]:
        return sorted(step for step, names in _folders(root).items() if MANIFEST in names)

    def is_step(self, folder: StorePath) -> bool:
        return MANIFEST in folder.sizes()

    def open(self, path: StorePath, nbytes: int | None = None) -> OpenFile:
        return StoredBytes(path, nbytes)

    def check_entries(self, folder: StorePath, sizes: Mapping[str, int]) -> None:
        there = folder.sizes(depth=2)
        for name in sorted({*sizes, MANIFEST} - there.keys()):
            raise CheckpointCorrupt("the file is not there", folder / name)
        _check_sizes(folder, there, sizes)

    def prepare(self, root: StorePath, lock: ExitStack) -> None:
        places = [root]
        while places[-1].parent != places[-1]:
            places.append(places[-1].parent)
        refuse_steps(
            place for place in places if step_of(place.name) is not None and self.is_step(place)
        )
        for step, names in _folders(root).items():
            folder = root / step_name(step)
            if MANIFEST not in names and not (folder / MANIFEST).is_unanswered:
                _remove_files(folder, names)

    def writers(self, root: StorePath) -> list[str]:
        names = [name for name in root.sizes() if name.startswith(WRITTEN_BY)]
        return sorted(name.removeprefix(WRITTEN_BY) for name in names)

    def claim(self, root: StorePath, writer: str) -> None:
        (root / f"{WRITTEN_BY}{writer}").overwrite(b"")

    def holds(self, target: StorePath) -> bool:
        return self.is_step(target)

    def others(self, folder: StorePath) -> list[str]:
        return []  # they stay when a step is removed

    def make_temporary(self, root: StorePath, step: int, replaced: Replaced) -> StorePath:
        folder = root / step_name(step)
        (folder / MANIFEST).refuse_unanswered()
        if replaced is not Replaced.WHOLE:
            self._remove(folder)  # also what a job that saves at the same time has uploaded
        return folder

    def file_name(self, rank: int) -> str:
        return file_name(rank, uuid.uuid4().hex[:16])

    def create(self, path: StorePath) -> FileInProgress:
        return Upload(path)

    def commit(
        self, temporary: StorePath, target: StorePath, manifest: bytes, sizes: Mapping[str, int],
        replaced: Replaced
    ) -> None:  # fmt: skip
        there = target.sizes(depth=2)
        for name in sorted(sizes.keys() - there.keys()):
            raise CheckpointError("was removed while it was saved: by another job?", target / name)
        overwrites = replaced is Replaced.WHOLE
        if MANIFEST in there and not overwrites:
            raise CheckpointError("another job has saved this step meanwhile", target)
        _check_sizes(target, there, sizes)
        path = target / MANIFEST
        try:
            (path.overwrite if overwrites else path.create)(manifest)
        except (CheckpointError, FileExistsError) as error:
            # The answer to a write that has succeeded may be lost, and the second try refused.
            if not self._is(path, manifest):
                late = "; it may still come to be, whole" if path.is_unanswered else ""
                raise CheckpointError(f"could not be committed: {error}{late}", target) from error
        if overwrites:
            _remove_files(target, there.keys() - sizes)

    def _is(self, path: StorePath, data: bytes) -> bool:
        try:
            return (
                self.open(path, len(data)).nbytes == len(data) and path.read(0, len(data)) == data
            )
        except (CheckpointError, FileNotFoundError):
            return False

    def discard(self, temporary: StorePath) -> None:
        try:
            names = temporary.sizes()
            # Otherwise it is a step, if of another job, or may become one by a late answer.
            if MANIFEST not in names and not (temporary / MANIFEST).is_unanswered:
                _remove_files(temporary, names)
        except CheckpointError:
            pass  # the failure itself is raised; the next save sweeps

    def remove_steps(self, folders: Sequence[StorePath]) -> None:
        for folder in folders:
            self._remove(folder)

    def _remove(self, folder: StorePath) -> None:
        """Remove a step; without its manifest, what is left of it is none."""
        names = folder.sizes()
        if MANIFEST in names:
            (folder / MANIFEST).remove()
        _remove_files(folder, names)


@final
class StoredBytes:
    """A file of a store, open for reading in blocks.

    Raises:
        CheckpointCorrupt: it is not there, or has another size.
    """

    def __init__(self, path: StorePath, nbytes: int | None = None) -> None:
        self.path = path
        try:
            self.nbytes: int = path.call(lambda fs, key: fs.info(key)["size"], FileNotFoundError)
        except FileNotFoundError as error:
            raise CheckpointCorrupt("the file is not there", path) from error
        if nbytes is not None and nbytes != self.nbytes:
            raise CheckpointCorrupt(f"has {self.nbytes} bytes instead of {nbytes}", path)
        self._start, self._block = 0, b""

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset`` on."""
        while target:
            skip = offset - self._start
            if not 0 <= skip < len(self._block):
                self._load(offset, max(len(target), _BLOCK_NBYTES))
                skip = 0
            data = self._block[skip : skip + len(target)]
            target[: len(data)] = data
            target, offset = target[len(data) :], offset + len(data)

    def _load(self, offset: int, nbytes: int) -> None:
        stop = min(offset + nbytes, self.nbytes)
        try:
            block = self.path.read(offset, stop) if offset < stop else b""
        except FileNotFoundError as error:
            raise CheckpointCorrupt("the file is not there", self.path) from error
        if not block:
            raise CheckpointCorrupt(f"ends at byte {offset}", self.path)
        self._start, self._block = offset, block

    def close(self) -> None:
        """Free the block."""
        self._start, self._block = 0, b""


def _folders(root: StorePath) -> dict[int, dict[str, int]]:
    """The sizes of the files in folders with names of steps, by name and step."""
    folders: dict[int, dict[str, int]] = {}
    for path, nbytes in root.sizes(depth=2).items():
        folder, _, name = path.partition("/")
        step = step_of(folder)
        if step is not None and name:
            folders.setdefault(step, {})[name] = nbytes
    return folders


def _check_sizes(folder: StorePath, there: Mapping[str, int], sizes: Mapping[str, int]) -> None:
    for name in sorted(there.keys() - sizes - {MANIFEST}):
        if is_file_name(name):
            continue  # a late upload of a save that was given up, or of a step that was replaced
        raise CheckpointCorrupt("the checkpoint has no such file", folder / name)
    for name, nbytes in sizes.items():
        if there[name] != nbytes:
            raise CheckpointCorrupt(f"has {there[name]} bytes instead of {nbytes}", folder / name)


def _remove_files(folder: StorePath, names: Iterable[str]) -> None:
    """Remove the files of ranks; what else is there was not saved by us."""
    for name in names:
        if is_file_name(name) and not (folder / name).is_unanswered:
            (folder / name).remove()
