"""Open memory without a name (a memfd) of another process, where that process is of the same user.

Only the user of a process, and root, can open its files through ``/proc``. So a path that came from
somewhere else can lead to somebody else's memory only if this process is root's; its owner shows.
"""

from __future__ import annotations

import os


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
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    owner, user = os.fstat(descriptor).st_uid, os.geteuid()
    # What was opened is asked, and not the path: that may lead elsewhere now.
    if owner != user or os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{name} (deleted)":
        os.close(descriptor)
        raise OSError(f"{path} is memory of user {owner}, and this process of user {user}")
    return descriptor
