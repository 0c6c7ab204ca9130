"""Files that others may have put there: how they are opened for reading, and replaced.

A folder of a run may come from somebody else, and others may write into the folder in which a file
is made. A pipe in the place of a file would hold up its reader for ever, a link would lead a writer
to another file, and a sparse file of some terabytes takes no space on a disk.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO

# Windows has none of them but the last.
_NOFOLLOW, _NONBLOCK, _CLOEXEC, _BINARY = (
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
)
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_plain(
    path: str | os.PathLike[str], max_nbytes: int = sys.maxsize, *, follows: bool = False
) -> BinaryIO:
    """Open an ordinary file of at most ``max_nbytes`` for reading; it never waits.

    Args:
        follows: whether the path may be a link: only for one that the user has named.

    Raises:
        OSError: it cannot be opened, is no ordinary file, or is larger.
    """
    flags = os.O_RDONLY | _NONBLOCK | _CLOEXEC | _BINARY | (0 if follows else _NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError as error:  # a link gives ELOOP, which says little, and a socket ENXIO
        if error.errno in (errno.ELOOP, errno.ENXIO):
            _refuse_kind(os.lstat(path).st_mode, path)
        raise
    try:
        status = os.fstat(fd)
        _refuse_kind(status.st_mode, path)
        if status.st_size > max_nbytes:
            text = f"it has {status.st_size} bytes, more than {max_nbytes}"
            raise OSError(errno.EFBIG, text, os.fspath(path))
    except BaseException:
        os.close(fd)
        raise
    return os.fdopen(fd, "rb")


def read_plain(path: str | os.PathLike[str], max_nbytes: int, *, follows: bool = False) -> bytes:
    """All bytes of an ordinary file, as ``open_plain``; also of one that grows meanwhile."""
    with open_plain(path, max_nbytes, follows=follows) as file:
        return file.read(max_nbytes)


def create_plain(path: str | os.PathLike[str], *, appends: bool = False) -> int:
    """Open an ordinary file for writing at its end, and no link to one; the descriptor.

    Args:
        appends: to what is in the file; otherwise a file that is there is replaced by a new one.

    Raises:
        OSError: it cannot be opened, or is no ordinary file.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | _NOFOLLOW | _NONBLOCK | _CLOEXEC | _BINARY
    if not appends:
        Path(path).unlink(missing_ok=True)
        flags |= os.O_EXCL
    fd = os.open(path, flags, 0o666)
    try:
        _refuse_kind(os.fstat(fd).st_mode, path)
    except OSError:
        os.close(fd)
        raise
    return fd


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``, which ``os.write`` may do in parts."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _refuse_kind(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind} and no ordinary file", os.fspath(path))
