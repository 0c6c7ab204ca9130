"""The lock of a folder of checkpoints: one save at a time writes into it."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from echelon.checkpoint.files import LOCK, NOFOLLOW
from echelon.process.atomic_files import naming, remove_empty_folder, remove_file
from echelon.process.file_lock import lock_file, unlock_file
from echelon.process.operating_system import at_fork

_locks: set[int] = set()


def _drop_locks_after_fork() -> None:
    """Close the locks in a fork, such as a data loader, which may outlive the parent."""
    while _locks:
        os.close(_locks.pop())


at_fork(after_in_child=_drop_locks_after_fork)


def remove_unused(root: Path) -> None:
    """Remove the folder of a run if nothing was saved there, with its lock, where that can be."""
    with suppress(OSError):
        if os.listdir(root) == [LOCK]:
            with lock(root):  # while another save holds it, the folder stays
                remove_file(root / LOCK)
        remove_empty_folder(root)


@contextmanager
def lock(root: Path) -> Iterator[None]:
    """Hold the lock of ``root``, so that nobody else saves into it; it ends with the process.

    Raises:
        BlockingIOError: another save holds it.
    """
    path = root / LOCK
    # Who may read a file may lock it, and could stop all saves: only the user may read this one.
    fd = os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o600)
    _locks.add(fd)
    try:
        with naming(path):
            if sys.platform != "win32":
                status = os.fstat(fd)
                if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
                    os.fchmod(fd, 0o600)  # an earlier version made it
            lock_file(fd)
        try:
            yield
        finally:
            with suppress(OSError):
                unlock_file(fd)
    finally:
        if fd in _locks:
            _locks.remove(fd)
            os.close(fd)
