"""A store for the ranks of one host, in memory that only their user can open.

torch's TCP store asks nobody who they are: every user of the host can read and write what ranks
tell each other in it. A file store in a memfd listens nowhere, has no name, and ends with the last
rank that has it open; the kernel asks for the user.
"""

from __future__ import annotations

import os

from torch._C import _distributed_c10d as c10d

from echelon.errors import WorldError
from echelon.process.process_status import open_memory

VARIABLE = "ECHELON_STORE"  # of ``echelon run``: the path of its store, and the id of the job
_NAME = "echelon store"


def create() -> tuple[str, c10d.Store]:
    """A new store, and the path under which processes of this user open it while this one lives."""
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    return f"/proc/{os.getpid()}/fd/{descriptor}", _of(descriptor)


def open_existing(path: str) -> c10d.Store:
    """The store that another process of this host has created.

    Raises:
        WorldError: it cannot be reached from here, or is not this user's.
    """
    try:
        return _of(open_memory(path, _NAME))
    except OSError as error:
        raise WorldError(
            f"process {os.getpid()} cannot open the store of its job ({error}): the ranks of a "
            "host must be processes of one user in one container. Otherwise give all ranks one "
            "ECHELON_SECRET, and they meet over the network; if another user of this host has "
            "written that path, this is how it is refused"
        ) from error


def _of(descriptor: int) -> c10d.Store:
    # The descriptor stays open as long as the process: torch opens the path anew in each call, and
    # once more when the store is let go of, by when the number must not be of another file.
    return c10d.FileStore(f"/proc/self/fd/{descriptor}", -1)
