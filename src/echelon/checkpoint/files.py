"""Files that are there whole or not at all, in folders that appear by one rename.

::

    runs/a/                      one folder for each run
      .lock                      held by the save that is under way
      .saving-000000020-1f3c…/   what it has written; becomes a step, or is swept away
      .removing-7ab2…/           what retention takes away, or a damaged step
      step-000000010/            committed, and never written again

Nothing else in this package writes to a disk. Every call may raise ``OSError``, which names the
file or folder.

[Note: early writeback]
Without it the kernel keeps what was written until ``fsync``, and the disk has nothing to do
meanwhile: on the disk of docs/design-log.md two ranks that write 128 MiB each take a third longer.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self, final

from echelon.checkpoint.checksum import Checksum
from echelon.checkpoint.format import BEGINNING_NBYTES, newer_schema
from echelon.checkpoint.records import MANIFEST, MAX_MANIFEST_NBYTES, step_name, step_of
from echelon.errors import CheckpointCorrupt, CheckpointError

_LOCK, _SAVING, _REMOVING = ".lock", ".saving-", ".removing-"
_LINK = "is a symbolic link, not a file"
_CHUNK_NBYTES = 1 << 20  # hashed and then written while it is in the cache


# Writing -------------------------------------------------------------------------------------


@final
class NewFile:
    """A file that is being written; a context manager, after which it is on the disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nbytes = 0
        self._begun = 0  # bytes with which the disk has begun
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)

    def write(self, data: memoryview) -> str:
        """Append ``data``; its checksum."""
        checksum = Checksum()
        for start in range(0, len(data), _CHUNK_NBYTES):
            chunk = data[start : start + _CHUNK_NBYTES]
            checksum.update(chunk)
            with _naming(self.path):
                while chunk:
                    written = os.write(self._fd, chunk)
                    chunk = chunk[written:]
                    self.nbytes += written
            if self.nbytes - self._begun >= _CHUNK_NBYTES:
                begin_writeback(self._fd, self._begun, self.nbytes - self._begun)
                self._begun = self.nbytes
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
        with _naming(self.path):
            try:
                if error is None:
                    os.fsync(fd)
            finally:
                os.close(fd)


def write_file(path: Path, data: bytes) -> None:
    """Write a file and see it onto the disk."""
    with NewFile(path) as file:
        file.write(memoryview(data))


def sync_folder(path: Path) -> None:
    """See the entries of a folder onto the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    with _naming(path):
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have an error say where it happened; calls that take a descriptor do not know."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and see them onto the disk."""
    missing = [one for one in (path, *path.parents) if not one.is_dir()]
    for one in reversed(missing):
        os.makedirs(one, exist_ok=True)  # another rank may make it, too
        sync_folder(one.parent)


# Steps ---------------------------------------------------------------------------------------


def steps(root: Path) -> list[int]:
    """The committed steps in a folder, oldest first; none where there is no folder."""
    try:
        entries = _entries(root)
    except FileNotFoundError:
        return []
    found = (step_of(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False))
    return sorted(step for step in found if step is not None)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with _naming(folder), os.scandir(folder) as entries:
        return list(entries)


_locks: set[int] = set()


def _leave_locks() -> None:
    """A fork, such as a process that loads data, must not hold the locks of a parent that dies."""
    while _locks:
        os.close(_locks.pop())


os.register_at_fork(after_in_child=_leave_locks)


@contextmanager
def lock(root: Path) -> Iterator[None]:
    """Be the only one that saves into ``root``; the lock goes with the process that holds it.

    Raises:
        BlockingIOError: another one saves into it.
    """
    path = root / _LOCK
    # Whoever may read a file may lock it, and so keep all others from it: nobody else may read it.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    _locks.add(fd)
    try:
        with _naming(path):
            found = os.fstat(fd)
            if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) & 0o077:
                os.fchmod(fd, 0o600)  # an earlier version has made it
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield
        finally:
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        if fd in _locks:
            _locks.remove(fd)
            os.close(fd)


def temporary(root: Path, step: int) -> Path:
    """A new folder for what a save of ``step`` writes."""
    path = root / f"{_SAVING}{step:09}-{uuid.uuid4().hex}"
    os.mkdir(path)
    return path


def sweep(root: Path) -> None:
    """Remove what killed saves have left in ``root``. The caller holds the lock."""
    for entry in _entries(root):
        if entry.name.startswith((_SAVING, _REMOVING)):
            _remove(Path(entry.path))


def commit(made: Path, root: Path, step: int, *, replaces: bool) -> Path:
    """Make a folder that is complete a step: from here on, and not before, it is there.

    Args:
        replaces: whether there is a damaged one, which goes.

    Raises:
        OSError: there is no such step now.
        CheckpointError: there is such a step already; or it is there, and may not outlive a loss
            of power.
    """
    target = root / step_name(step)
    sync_folder(made)
    aside = _set_aside(target) if replaces else None
    if aside is None and target.exists():  # a rename would replace an empty folder
        raise CheckpointError("there is such a step already, and steps are never replaced", target)
    os.rename(made, target)
    try:
        sync_folder(root)
    except OSError as error:
        _take_back(target, made, error)
        raise
    if aside is not None:
        discard(aside)
    return target


def _take_back(target: Path, made: Path, cause: OSError) -> None:
    """Undo a commit of which nobody knows whether it reached the disk."""
    try:
        os.rename(target, made)
    except OSError as error:
        raise CheckpointError(
            f"is saved, but may not outlive a loss of power: {cause}", target, errno=cause.errno
        ) from error


def discard(made: Path) -> None:
    """Remove a folder that nobody needs, as that of a save that failed."""
    with suppress(OSError):  # the failure itself is told; the next save sweeps
        _remove(made)


def prune(root: Path, step: int, keep: int) -> None:
    """Remove steps older than the newest ``keep`` up to ``step``, which is committed and stays.

    What nothing here can read stays and does not count: steps that a newer version has written, or
    that have no manifest.
    """
    old = [one for one in steps(root) if one < step and _counts(root / step_name(one))]
    gone = [_set_aside(root / step_name(one)) for one in [*old, step][:-keep]]
    if gone:
        sync_folder(root)
    for path in gone:
        _remove(path)


def _counts(folder: Path) -> bool:
    """Whether a folder is a step that this version may know."""
    try:
        with SavedBytes(folder / MANIFEST) as file:
            beginning = bytearray(min(file.nbytes, BEGINNING_NBYTES))
            file.read_into(memoryview(beginning), 0)
    except CheckpointCorrupt:
        return False
    return newer_schema(bytes(beginning)) is None


def _set_aside(path: Path) -> Path:
    """Take a folder's name away, so that nobody finds a part of it; returns where it is."""
    aside = path.with_name(f"{_REMOVING}{uuid.uuid4().hex}")
    os.rename(path, aside)
    return aside


def _remove(path: Path) -> None:
    """Remove a folder, or what else stood in its place: a pipe must not be opened."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        os.unlink(path)


# Reading -------------------------------------------------------------------------------------


@final
class SavedBytes:
    """A file of a checkpoint, open for reading. A context manager."""

    def __init__(self, path: Path, nbytes: int | None = None) -> None:
        """Open it.

        Args:
            nbytes: that it must have; None: any number.

        Raises:
            CheckpointCorrupt: it is not there, no ordinary file, or has another size.
        """
        self.path = path
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # no wait for a pipe's other end
        try:
            self._fd = os.open(path, flags)
        except FileNotFoundError as error:
            raise CheckpointCorrupt("the file is not there", path) from error
        except OSError as error:  # of a link, a socket, or a device that nobody drives
            problem = _problem(os.lstat(path), None)
            if problem is not None:
                raise CheckpointCorrupt(problem, path) from error
            raise
        try:
            with _naming(path):
                found = os.fstat(self._fd)
            problem = _problem(found, nbytes)
            if problem is not None:
                raise CheckpointCorrupt(problem, path)
        except BaseException:
            os.close(self._fd)
            raise
        self.nbytes = found.st_size

    def read_into(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset`` on."""
        with _naming(self.path):
            while target:
                count = os.preadv(self._fd, [target], offset)
                if not count:
                    raise CheckpointCorrupt(f"ends at byte {offset}", self.path)
                target, offset = target[count:], offset + count

    def close(self) -> None:
        """Let it go."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_manifest(folder: Path) -> bytes:
    """The bytes of the manifest of a step.

    Raises:
        CheckpointCorrupt: there is none, or it is larger than any manifest.
    """
    with SavedBytes(folder / MANIFEST) as file:
        if file.nbytes > MAX_MANIFEST_NBYTES:
            raise CheckpointCorrupt(f"has {file.nbytes} bytes, too many for a manifest", file.path)
        data = bytearray(file.nbytes)
        file.read_into(memoryview(data), 0)
    return bytes(data)


def check_entries(folder: Path, sizes: Mapping[str, int]) -> None:
    """Refuse a step that has not just its manifest and these files.

    Args:
        sizes: bytes of each file, by name.

    Raises:
        CheckpointCorrupt: names the first that is missing, of another size, or too many.
    """
    found = {entry.name: entry for entry in _entries(folder)}
    for name in sorted({*sizes, MANIFEST}):
        if name not in found:
            raise CheckpointCorrupt("the file is not there", folder / name)
    for name in sorted(found.keys() - sizes - {MANIFEST}):
        raise CheckpointCorrupt("the checkpoint has no such file", folder / name)
    for name, nbytes in sizes.items():
        problem = _problem(found[name].stat(follow_symlinks=False), nbytes)
        if problem is not None:
            raise CheckpointCorrupt(problem, folder / name)


def _problem(found: os.stat_result, nbytes: int | None) -> str | None:
    """Why this is no file of so many bytes; None if it is one."""
    if stat.S_ISLNK(found.st_mode):
        return _LINK
    if not stat.S_ISREG(found.st_mode):
        return "is no ordinary file"
    if nbytes is not None and nbytes != found.st_size:
        return f"has {found.st_size} bytes instead of {nbytes}"
    return None


_SYNC_FILE_RANGE_WRITE = 2  # begin to write, and do not wait

_begin = getattr(ctypes.CDLL(None), "sync_file_range", None)  # Linux has it
if _begin is not None:
    _begin.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def begin_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Have the kernel begin to write a range of a file to the disk, if it can.

    What goes wrong is told by ``fsync``, without which nothing is known to be on the disk anyway.
    """
    if _begin is not None:
        _begin(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)
