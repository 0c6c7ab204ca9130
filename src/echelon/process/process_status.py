"""What ``/proc`` shows of processes of this host: what they do now, and their memory."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

_PROC = Path("/proc")
ENDED, _STOPPED = "has ended", "is stopped by SIGSTOP or a debugger"
_ACTIVITIES = {
    "R": "computes outside communication",
    "D": "waits for a device",
    "T": _STOPPED,
    "t": _STOPPED,
    "X": ENDED,
    "Z": ENDED,
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


@final
@dataclass(frozen=True, slots=True)
class SystemThread:
    """A thread of this process as the kernel knows it; it outlives the thread of Python.

    Attributes:
        number: the kernel's number of it.
        start_ticks: tells it from another thread that has had the same number.
    """

    number: int
    start_ticks: int

    @classmethod
    def of(cls, number: int) -> Self | None:
        """The thread of that number; None where it has ended, or there is no ``/proc``."""
        fields = _fields(_PROC / "self" / "task" / str(number) / "stat")
        return cls(number, int(fields[19])) if fields and fields[0] not in "ZX" else None

    def is_alive(self) -> bool:
        """Whether the kernel still has it."""
        return SystemThread.of(self.number) == self


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


def others_work() -> bool:
    """Whether other threads of this process, or processes that come of it, run or read from a disk.

    Threads that are ready to run on a busy machine count as well. False if there is no /proc.
    """
    return _works(os.getpid(), besides=threading.get_native_id())


def _works(pid: int, besides: int = 0) -> bool:
    tasks = _PROC / str(pid) / "task"
    try:
        threads = [task for task in tasks.iterdir() if task.name != str(besides)]
        children = [child for task in tasks.iterdir() for child in _words(task / "children")]
    except OSError:  # it has ended meanwhile
        return False
    states = (fields[0] for thread in threads if (fields := _fields(thread / "stat")))
    return any(state in "RD" for state in states) or any(_works(int(child)) for child in children)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # it has ended meanwhile, or the kernel was built without such a file
        return []


def resident_nbytes(pid: int) -> int | None:
    """The bytes of physical memory that a process uses; None where it has ended."""
    fields = _fields(_PROC / str(pid) / "stat")
    return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") if fields else None


def _fields(path: Path) -> list[str]:
    """What follows the name in a ``stat`` file; empty where there is none any more."""
    try:
        return path.read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []
