"""Files that are there whole or not at all, in folders that appear by one rename.

::

    runs/a/                      one folder for each run
      .lock                      held by the save that is under way
      .saving-000000020-1f3c…/   what it has written; becomes a step, or is swept away
      .removing-7ab2…/           what retention takes away, or a damaged step
      .written-by-lightning      if not ec.save, but an integration has the steps of this folder
      step-000000010/            committed, and never written again

But for the lock (``save_lock.py``), nothing else in this package writes to a disk. Every call may
raise ``OSError``, which names the file or folder. What has other names than these, in the folder of
a run or in that of a step, is never removed.

[Note: early writeback]
Without it the kernel keeps what was written until ``fsync``, and the disk is idle meanwhile: two
ranks that write 128 MiB each took a third longer (docs/design/checkpoint.md has the numbers).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

from echelon.checkpoint.checksum import Checksum
from echelon.checkpoint.records import (
    MANIFEST,
    WRITTEN_BY,
    Replaced,
    is_file_name,
    step_name,
    step_of,
)
from echelon.errors import CheckpointCorrupt, CheckpointError
from echelon.process.atomic_files import exchange, naming, remove_folder, sync_folder
from echelon.process.operating_system import c_function

_SAVING, _REMOVING = ".saving-", ".removing-"
_LEFT = re.compile(rf"{_SAVING}[0-9]{{9}}-[0-9a-f]{{32}}|{_REMOVING}[0-9a-f]{{32}}")
LOCK = ".lock"
_CHUNK_NBYTES = 1 << 20  # hashed and then written while it is in the cache
_READ_NBYTES = 1 << 30  # macOS refuses to read 2 GiB at a time
# Windows has the first and no other.
BINARY, NOFOLLOW, _NONBLOCK = (
    getattr(os, name, 0) for name in ("O_BINARY", "O_NOFOLLOW", "O_NONBLOCK")
)


# Writing -------------------------------------------------------------------------------------


@final
class NewFile:
    """A new file that is written; a context manager, which syncs it to disk at its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._writeback_nbytes = 0  # how much the kernel was told to write back
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW | BINARY
        self._fd = os.open(path, flags, 0o644)

    def write(self, data: memoryview) -> str:
        """Append ``data`` and return its checksum."""
        checksum = Checksum()
        for start in range(0, len(data), _CHUNK_NBYTES):
            chunk = data[start : start + _CHUNK_NBYTES]
            checksum.update(chunk)
            with naming(self.path):
                while chunk:
                    written = os.write(self._fd, chunk)
                    chunk = chunk[written:]
                    self.nbytes += written
            begin = self._writeback_nbytes
            if self.nbytes - begin >= _CHUNK_NBYTES:
                begin_writeback(self._fd, begin, self.nbytes - begin)
                self._writeback_nbytes = self.nbytes
        return checksum.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        fd, self._fd = self._fd, -1
        with naming(self.path):
            try:
                if error is None:
                    os.fsync(fd)
            finally:
                os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and sync it to disk."""
    with NewFile(path) as file:
        file.write(memoryview(data))


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and sync them to disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        if folder.is_symlink():
            sentence = f"it is a link to {os.readlink(folder)!r}, which is not there"
            raise FileNotFoundError(errno.ENOENT, sentence, str(folder))
        os.makedirs(folder, exist_ok=True)  # another rank may make it, too
        sync_folder(folder.parent)


# Steps ---------------------------------------------------------------------------------------


def steps(root: Path) -> list[int]:
    """The committed steps in a folder, oldest first; none where there is no folder.

    Saves leave no empty folder, but copies of a run that were interrupted may.
    """
    try:
        entries = _entries(root)
    except FileNotFoundError:
        return []
    folders = (entry for entry in entries if entry.is_dir(follow_symlinks=False))
    numbers = ((step_of(folder.name), Path(folder.path)) for folder in folders)
    return sorted(number for number, path in numbers if number is not None and not _is_empty(path))


def _is_empty(folder: Path) -> bool:
    """Whether nothing is in a folder, or another job has removed it meanwhile."""
    try:
        with naming(folder), os.scandir(folder) as entries:
            return next(entries, None) is None
    except FileNotFoundError:
        return True


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with naming(folder), os.scandir(folder) as entries:
        return list(entries)


def make_temporary(root: Path, step: int) -> Path:
    """Make a folder for what a save of ``step`` writes."""
    path = root / f"{_SAVING}{step:09}-{uuid.uuid4().hex}"
    os.mkdir(path)
    return path


def sweep(root: Path) -> None:
    """Remove what killed saves left in ``root``. The caller holds the lock."""
    for entry in _entries(root):
        if _LEFT.fullmatch(entry.name):
            remove(Path(entry.path))


def writers(root: Path) -> list[str]:
    """The integrations whose steps a folder has; none if they are those of ``ec.save``."""
    names = (entry.name for entry in _entries(root))
    return sorted(name.removeprefix(WRITTEN_BY) for name in names if name.startswith(WRITTEN_BY))


def claim(root: Path, writer: str) -> None:
    """Note that the steps of a folder are those of an integration. The caller holds the lock."""
    write_file(root / f"{WRITTEN_BY}{writer}", b"")
    sync_folder(root)


def others(folder: Path) -> list[str]:
    """The names of what no save has written in the folder of a step; saves write ordinary files."""
    return sorted(
        entry.name
        for entry in _entries(folder)
        if not entry.is_file(follow_symlinks=False)
        or (entry.name != MANIFEST and not is_file_name(entry.name))
    )


def commit(temporary: Path, target: Path, replaced: Replaced) -> None:
    """Make a complete folder the step ``target`` by one rename.

    Args:
        replaced: what there is of this number. A damaged step is removed; a whole one is exchanged
            for the new one, so that there is no moment with neither.

    Raises:
        OSError: the step was not committed.
        CheckpointError: there is such a step already; or it was committed and may be lost if the
            power fails.
    """
    sync_folder(temporary)
    aside = _set_aside(target) if replaced is Replaced.DAMAGED else None
    if replaced is Replaced.WHOLE:
        exchange(temporary, target)
        aside = temporary
    elif aside is None and os.path.lexists(target):  # a rename would replace an empty folder
        raise CheckpointError("there is such a step already, and steps are never replaced", target)
    else:
        os.rename(temporary, target)
    try:
        sync_folder(target.parent)
    except OSError as error:
        _take_back(target, temporary, error, exchange if aside == temporary else os.rename)
        raise
    if aside is not None:
        discard(aside)


def _take_back(
    target: Path, temporary: Path, cause: OSError, undo: Callable[[Path, Path], None]
) -> None:
    """Undo a commit that may or may not have reached the disk."""
    try:
        undo(target, temporary)
    except OSError as error:
        raise CheckpointError(
            f"is saved, but may not outlive a loss of power: {cause}", target, errno=cause.errno
        ) from error


def discard(folder: Path) -> None:
    """Remove a folder that is no longer needed, such as that of a save that failed."""
    with suppress(OSError):  # the failure itself is raised; the next save sweeps
        remove(folder)


def remove_steps(folders: Sequence[Path]) -> None:
    """Remove steps of one run, none of which a reader finds in part."""
    removed = [_set_aside(folder) for folder in folders]
    if removed:
        sync_folder(removed[0].parent)
    for path in removed:
        remove(path)


def _set_aside(path: Path) -> Path:
    """Rename a folder so that no reader finds a part of it, and return its new path."""
    aside = path.with_name(f"{_REMOVING}{uuid.uuid4().hex}")
    os.rename(path, aside)
    return aside


def remove(path: Path) -> None:
    """Remove a folder, or a file or pipe in its place, which is never opened."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


def remove_run(root: Path, writer: str) -> bool:
    """Remove the steps of an integration, and their folder if nothing else is in it.

    Nobody finds a part of it, and nobody saves there.

    Returns:
        Whether all of it is gone.
    """
    folders = [root / step_name(step) for step in steps(root)]
    ours = [folder for folder in folders if not others(folder)]
    names = {entry.name for entry in _entries(root) if not _LEFT.fullmatch(entry.name)}
    if names - {LOCK, f"{WRITTEN_BY}{writer}", *(folder.name for folder in ours)}:
        remove_steps(ours)
        return False
    remove_folder(root)
    return True


# Reading -------------------------------------------------------------------------------------


@final
class SavedBytes:
    """A file of a checkpoint, open for reading; a context manager.

    Args:
        nbytes: the size that the file must have; None: any.

    Raises:
        CheckpointCorrupt: the file is not there, is no ordinary file, or has another size.
    """

    def __init__(self, path: Path, nbytes: int | None = None) -> None:
        self.path = path
        # Without O_NONBLOCK, opening a pipe would wait for its other end.
        flags = os.O_RDONLY | NOFOLLOW | _NONBLOCK | BINARY
        try:
            self._fd = os.open(path, flags)
        except FileNotFoundError as error:
            raise CheckpointCorrupt("the file is not there", path) from error
        except OSError as error:  # the path is a link, a socket, or a device without a driver
            problem = _problem(os.lstat(path), None)
            if problem is not None:
                raise CheckpointCorrupt(problem, path) from error
            raise
        try:
            with naming(path):
                status = os.fstat(self._fd)
            problem = _problem(status, nbytes)
            if problem is not None:
                raise CheckpointCorrupt(problem, path)
        except BaseException:
            os.close(self._fd)
            raise
        self.nbytes = status.st_size

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset`` on."""
        with naming(self.path):
            while target:
                count = _read_at(self._fd, target[:_READ_NBYTES], offset)
                if not count:
                    raise CheckpointCorrupt(f"ends at byte {offset}", self.path)
                target, offset = target[count:], offset + count

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_at(fd: int, target: memoryview, offset: int) -> int:
    """Read into the start of ``target``; how many bytes."""
    if sys.platform != "win32":
        return os.preadv(fd, [target], offset)
    os.lseek(fd, offset, os.SEEK_SET)
    data = os.read(fd, len(target))
    target[: len(data)] = data
    return len(data)


def check_entries(folder: Path, sizes: Mapping[str, int]) -> None:
    """Refuse a step that does not have exactly its manifest and these files.

    Args:
        sizes: bytes of each file, by name.

    Raises:
        CheckpointCorrupt: names the first file that is missing, unexpected or of another size.
    """
    entries = {entry.name: entry for entry in _entries(folder)}
    for name in sorted({*sizes, MANIFEST}):
        if name not in entries:
            raise CheckpointCorrupt("the file is not there", folder / name)
    for name in sorted(entries.keys() - sizes - {MANIFEST}):
        raise CheckpointCorrupt("the checkpoint has no such file", folder / name)
    for name, nbytes in sizes.items():
        problem = _problem(entries[name].stat(follow_symlinks=False), nbytes)
        if problem is not None:
            raise CheckpointCorrupt(problem, folder / name)


def _problem(status: os.stat_result, nbytes: int | None) -> str | None:
    """Why this is no ordinary file of ``nbytes``; None if it is one."""
    if stat.S_ISLNK(status.st_mode):
        return "is a symbolic link, not a file"
    if not stat.S_ISREG(status.st_mode):
        return "is no ordinary file"
    if nbytes is not None and nbytes != status.st_size:
        return f"has {status.st_size} bytes instead of {nbytes}"
    return None


_SYNC_FILE_RANGE_WRITE = 2  # begin to write, and do not wait

_sync_file_range = c_function("sync_file_range")  # Linux has it
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def begin_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the kernel begin to write a range of a file to disk, where it has a call for that.

    Errors are left to ``fsync``, which has to succeed before anything counts as written.
    """
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)
