"""Files and folders that are replaced whole: whoever looks finds the old one or the new one.

::

    runs/a/
      .last.ckpt.echelon-1f3c…/   a draft, which is locked by its writer; swept when that was killed
      last.ckpt/                  what it becomes by one call of the operating system

Outside of a folder of steps (``checkpoint.files``), nothing else in the library renames or removes
what lies in a folder of a user. Links are never followed, and what we have not written is neither
replaced nor removed. All functions raise ``OSError``, which names the path.

[Note: exchange]
A rename replaces a file, and a folder only if it is empty. So a folder takes the place of a file,
of a link or of another folder by an exchange of the two names, after which the old one is in the
draft. Two renames would have a moment with neither. File systems that cannot exchange two names,
such as NFS, get an error before anything has changed.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import stat
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from echelon.process.file_lock import lock_file
from echelon.process.operating_system import c_function
from echelon.process.plain_file import write_all

_MARK = ".echelon-"
_DRAFT = re.compile(r"[0-9a-f]{32}")
_MAX_NAME_NBYTES = 200  # of a target, so that the name of its draft is none too long
_NOFOLLOW, _NONBLOCK, _BINARY, _DIRECTORY = (
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_DIRECTORY")
)


# Renames -------------------------------------------------------------------------------------

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2
_RENAME_SWAP = 2  # as macOS calls the exchange
# There is no such call, or this file system does not have it.
_UNKNOWN = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def _renameat2(source: Path, target: Path, flags: int) -> int:
    """Rename with flags of Linux; 0, or the number of the error."""
    function = c_function("renameat2")
    if function is None:
        return errno.ENOSYS
    done = function(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags)
    return 0 if done == 0 else ctypes.get_errno()


def _renamex(source: Path, target: Path, flags: int) -> int:
    """Rename with flags of macOS; 0, or the number of the error."""
    function = c_function("renamex_np")
    if function is None:
        return errno.ENOSYS
    done = function(os.fsencode(source), os.fsencode(target), flags)
    return 0 if done == 0 else ctypes.get_errno()


def exchange(first: Path, second: Path) -> None:
    """Exchange what two names of one file system stand for, at one instant.

    Raises:
        OSError: that cannot be done, and nothing has changed. ``ENOTSUP``: on this file system.
    """
    if sys.platform == "darwin":
        code = _renamex(first, second, _RENAME_SWAP)
    else:
        code = _renameat2(first, second, _RENAME_EXCHANGE)
    if code in _UNKNOWN:
        raise OSError(
            errno.ENOTSUP,
            "cannot be replaced at one instant, because this file system does not exchange two "
            "names: save under another name, or remove it first",
            str(second),
        )
    if code:
        raise OSError(code, os.strerror(code), str(second))


def move_new(source: Path, target: Path) -> None:
    """Rename a file or a folder to where nothing is, and sync the folder that it comes into.

    Raises:
        FileExistsError: something is there, if only a link that leads nowhere.
        OSError: it cannot be renamed.
    """
    code = _renameat2(source, target, _RENAME_NOREPLACE)
    if code in _UNKNOWN:  # the check and the rename are two calls there
        if os.path.lexists(target):
            code = errno.EEXIST
        else:
            os.rename(source, target)
            code = 0
    if code == errno.EEXIST:
        raise FileExistsError(code, "is there already: name a new one", str(target))
    if code:
        raise OSError(code, os.strerror(code), str(target))
    sync_folder(target.parent)


# Files ---------------------------------------------------------------------------------------


def replace_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file, in place of one that may be there.

    A link is replaced by the file, and what it leads to stays.

    Args:
        path: of the file.
        data: its content.
        sync: whether it is on the disk when this returns.

    Raises:
        OSError: it cannot be written, or there is something else than a file or a link.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a"
        >>> for data in (b"old", b"new"):
        ...     replace_file(path, data, sync=False)
        >>> path.read_bytes(), len(list(path.parent.iterdir()))
        (b'new', 1)
    """
    _refuse_special(path)
    _sweep(path.parent, _prefix(path.name))
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _BINARY
    draft, fd = _locked_draft(path, lambda draft: os.open(draft, flags, 0o666))
    try:
        try:
            with naming(draft):
                write_all(fd, data)
                if sync:
                    os.fsync(fd)
            if sys.platform != "win32":
                os.rename(draft, path)  # while it is locked
        finally:
            os.close(fd)
        if sys.platform == "win32":
            os.replace(draft, path)
    except BaseException:
        with suppress(OSError):  # the failure itself is raised; the next write sweeps
            os.unlink(draft)
        raise
    if sync:
        sync_folder(path.parent)


def _refuse_special(path: Path) -> None:
    """Refuse a pipe, a socket or a device, which a rename would remove, and a folder."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a folder, and a file is written here", str(path))
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise FileExistsError(
            errno.EEXIST, "is no ordinary file, and is not replaced by one", str(path)
        )


@final
class naming:
    """Add the path to an error; calls that take a descriptor do not know it."""

    # Not a generator: a checkpoint enters it for each piece that it reads.
    __slots__ = ("_path",)

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(self._path)


def system_error_behind(error: BaseException) -> OSError | None:
    """The error of the operating system that another was raised for; None if there is none.

    torch's writers end their archive after a failed write, and raise what that finds instead.

    Example:
        >>> try:
        ...     try:
        ...         raise OSError(28, "No space left on device")
        ...     finally:
        ...         raise RuntimeError("unexpected position")
        ... except RuntimeError as error:
        ...     print(system_error_behind(error))
        [Errno 28] No space left on device
    """
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


def sync_folder(path: Path) -> None:
    """Sync the entries of a folder to disk; Windows has no call for it."""
    if sys.platform == "win32":
        return
    fd = os.open(path, os.O_RDONLY | _DIRECTORY)
    with naming(path):
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


# Folders -------------------------------------------------------------------------------------


@contextmanager
def draft_folder(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, removed after the block unless it was renamed.

    It has a name that nobody else gives, and drafts of ``target`` that killed writers have left go
    first. Another writer that is at work keeps its own.

    Raises:
        OSError: it cannot be made.
    """
    _sweep(target.parent, _prefix(target.name))

    def make(draft: Path) -> int:
        os.mkdir(draft)
        return os.open(draft, os.O_RDONLY | _NOFOLLOW | _DIRECTORY)

    if sys.platform == "win32":  # where a folder cannot be opened
        draft, fd = _draft_of(target), None
        os.mkdir(draft)
    else:
        draft, fd = _locked_draft(target, make)
    try:
        yield draft
    finally:
        if fd is not None:
            os.close(fd)
        with suppress(OSError):  # the next draft sweeps
            _remove_tree(draft)


def sweep_drafts(folder: Path, prefix: str) -> None:
    """Remove what killed writers have left of targets whose names begin with ``prefix``."""
    _sweep(folder, f".{prefix}")


def replace_folder(draft: Path, target: Path, *, is_ours: Callable[[Path], bool]) -> None:
    """Have a draft take the place of ``target``, if that is ours; the draft then has the old one.

    See [Note: exchange].

    Args:
        draft: from ``draft_folder``, which removes what is in it afterwards.
        target: nothing, an empty folder, or what ``is_ours`` says yes to.
        is_ours: whether what is there was written by the caller, and may go.

    Raises:
        FileExistsError: somebody else's file or folder is there.
        OSError: it cannot be replaced.
    """
    if not os.path.lexists(target):
        move_new(draft, target)
        return
    if is_empty_folder(target):
        os.rename(draft, target)  # fails if it is not empty any more
    elif is_ours(target):
        exchange(draft, target)
        if not is_ours(draft):  # somebody has put something else there meanwhile
            exchange(draft, target)
            raise _foreign(target)
    else:
        raise _foreign(target)
    sync_folder(target.parent)


def _foreign(path: Path) -> FileExistsError:
    return FileExistsError(
        errno.EEXIST,
        "is there already and was not written for this purpose, so it is not replaced: name "
        "another place, or remove it yourself",
        str(path),
    )


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in a draft to disk, which others may have written."""
    for path, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(path, name), os.O_RDONLY | _NOFOLLOW | _NONBLOCK | _BINARY)
            with naming(Path(path, name)):
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)
        sync_folder(Path(path))


def remove_folder(path: Path) -> None:
    """Remove a folder that is ours, with all in it; nobody finds a part of it.

    Raises:
        OSError: it is a link or no folder, or cannot be removed.
    """
    if not is_folder(path):
        raise NotADirectoryError(errno.ENOTDIR, "is no folder, so it is not removed", str(path))
    aside = _draft_of(path)
    os.rename(path, aside)
    sync_folder(path.parent)
    _remove_tree(aside)


def remove_empty_folder(path: Path) -> None:
    """Remove a folder that has nothing in it.

    Raises:
        OSError: it has, or cannot be removed.
    """
    os.rmdir(path)


def remove_file(path: Path) -> None:
    """Remove a file of ours, or a link in its place, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def is_folder(path: Path) -> bool:
    """Whether there is a folder, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def is_empty_folder(path: Path) -> bool:
    """Whether there is a folder with nothing in it."""
    return is_folder(path) and not os.listdir(path)


# Drafts --------------------------------------------------------------------------------------


def _draft_of(target: Path) -> Path:
    return target.with_name(f"{_prefix(target.name)}{_MARK}{uuid.uuid4().hex}")


def _locked_draft(target: Path, make: Callable[[Path], int]) -> tuple[Path, int]:
    """Make a draft and lock it; a sweep that has come between the two has removed it.

    Args:
        make: makes a draft that is not there, and opens it.
    """
    while True:
        draft = _draft_of(target)
        try:
            fd = make(draft)
        except FileNotFoundError:
            if target.parent.is_dir():  # swept before it was opened
                continue
            raise
        try:
            lock_file(fd)
        except BlockingIOError:
            os.close(fd)
            continue
        except OSError:  # a file system without locks, where nobody sweeps
            return draft, fd
        if os.path.lexists(draft):
            return draft, fd
        os.close(fd)


def _prefix(name: str) -> str:
    encoded = os.fsencode(name)
    if len(encoded) > _MAX_NAME_NBYTES:
        name = hashlib.sha256(encoded).hexdigest()
    return f".{name}"


def _sweep(folder: Path, prefix: str) -> None:
    """Remove drafts in ``folder`` whose writers were killed."""
    if sys.platform == "win32":  # a folder cannot be locked there
        return
    for name in os.listdir(folder):
        target, _, number = name.rpartition(_MARK)
        if target.startswith(prefix) and _DRAFT.fullmatch(number):
            with suppress(OSError):  # it stays, which harms nobody
                _remove_abandoned(folder / name)


def _remove_abandoned(path: Path) -> None:
    """Remove a draft of this user that no process has locked."""
    fd = os.open(path, os.O_RDONLY | _NOFOLLOW | _NONBLOCK)
    try:
        status = os.fstat(fd)
        if status.st_uid == os.geteuid():
            lock_file(fd)  # raises while its writer lives
            if stat.S_ISDIR(status.st_mode):
                _remove_tree(path)
            elif stat.S_ISREG(status.st_mode):
                os.unlink(path)
    finally:
        os.close(fd)


def _remove_tree(path: Path) -> None:
    """Remove a draft, whatever an exchange has put in its place."""
    if is_folder(path):
        shutil.rmtree(path)
    else:
        remove_file(path)
