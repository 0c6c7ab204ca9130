"""What ``/proc`` shows of other processes of this host: what they do now, and their memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

_PROC = Path("/proc")
_ENDED, _STOPPED = "has ended", "is stopped by SIGSTOP or a debugger"
_ACTIVITIES = {
    "R": "computes outside communication",
    "D": "waits for a device",
    "T": _STOPPED,
    "t": _STOPPED,
    "X": _ENDED,
    "Z": _ENDED,
}


@final
@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One look at ``/proc/PID/stat``.

    Attributes:
        state: the kernel's letter, such as ``R`` for one that runs.
        parent: the process that started it.
        start_ticks: when it was started, in clock ticks since the machine was; tells it from
            another process that has had the same number.
    """

    state: str
    parent: int
    start_ticks: int

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """The status of a process; None where it has ended and nobody waits for it."""
        fields = _fields(_PROC / str(pid) / "stat")
        return cls(fields[0], int(fields[1]), int(fields[19])) if fields else None

    @property
    def ended(self) -> bool:
        """Whether it has ended, and only its parent has not looked."""
        return self.state in "ZX"

    @property
    def stopped(self) -> bool:
        """Whether a signal or a debugger has stopped it."""
        return self.state in "Tt"


def activity(pid: int, thread: int) -> str:
    """What a rank does that is in no communication, as it reads after its name.

    Args:
        thread: the kernel's number of the thread that runs the script: others of the process wake
            up now and then, whatever the rank does.
    """
    if not _PROC.exists():  # no Linux
        return "is outside communication"
    fields = _fields(_PROC / str(pid) / "task" / str(thread) / "stat")
    return _ACTIVITIES.get(fields[0] if fields else "X", "sleeps or waits outside communication")


def _fields(path: Path) -> list[str]:
    """What follows the name in a ``stat`` file; empty where there is none any more."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


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
