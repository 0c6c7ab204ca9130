"""Memory that is a file without a name, which other processes of the user open through ``/proc``.

No crash leaves such memory behind, because the kernel frees it with the last process that has it
open, and no disk is involved.
"""

from __future__ import annotations

import errno
import os

from echelon.errors import SharedMemoryError


def create_memory(name: str, nbytes: int, *, what: str) -> int:
    """The descriptor of new memory of zeros; pages that nobody writes to take none.

    Raises:
        SharedMemoryError: about ``what``; the process may not have files of this size.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        os.close(descriptor)
        raise memory_error(error, what, nbytes, available=0) from error
    return descriptor


def memory_error(error: OSError, what: str, nbytes: int, available: int) -> Exception:
    """The ``SharedMemoryError`` of a system call that could not get memory; others unchanged.

    Args:
        available: bytes that are free on the host.
    """
    if error.errno == errno.EFBIG:  # ulimit -f limits such memory like every file
        import resource  # which Windows does not have

        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return SharedMemoryError(what, nbytes, limit, file_limit=True)
    if error.errno in (errno.ENOSPC, errno.ENOMEM):
        return SharedMemoryError(what, nbytes, available)
    return error


def open_memory(path: str, name: str) -> int:
    """A descriptor of the memfd of ``path``, for reading and writing.

    Args:
        path: ``/proc/PID/fd/NUMBER``.
        name: that its process gave it.

    Raises:
        OSError: it cannot be reached from here, is something else, or of another user.
    """
    if os.readlink(path) != f"/memfd:{name} (deleted)":  # the process may be another by now
        raise OSError(f"{path} is no memory that is called {name!r}")
    descriptor = os.open(path, os.O_RDWR)
    owner, user = os.fstat(descriptor).st_uid, os.geteuid()
    # What was opened is asked, and not the path: that may lead elsewhere now.
    if owner != user or os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{name} (deleted)":
        os.close(descriptor)
        raise OSError(f"{path} is memory of user {owner}, and this process of user {user}")
    return descriptor
