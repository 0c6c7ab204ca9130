"""A disk that fails, or kills who uses it, at a chosen call of ``checkpoint.files``.

It stands for ``os``, ``shutil`` and ``fcntl`` there, notes every call, and asks a strike what to
do::

    with Disk(FailAt(rank=1, number=7, errno=errno.ENOSPC)) as disk:
        save()
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from echelon.checkpoint import files, save_lock
from echelon.process import atomic_files, file_lock

__all__ = ["Call", "Disk", "FailAt", "KillAt", "Point", "Strike", "lets"]

KINDS = {".lock": "lock", ".saving-": "save", ".removing-": "removed", "step-": "step"}
KINDS |= {"manifest": "manifest", "rank-": "rank file"}


class Call(NamedTuple):
    """One call of the operating system.

    Attributes:
        op: its name, such as ``"write"``.
        what: kind of its file or folder: one of ``KINDS``, or else ``"root"``.
        nth: of the same op and what on this rank, from 0 on.
        rank: who calls.
        number: of all calls on this rank, from 0 on.
        path: of the file or folder.
    """

    op: str
    what: str
    nth: int
    rank: int
    number: int
    path: str


# Given the call, and what carries it out: all of it, and a part of it where it has parts.
Act = Callable[[], Any]
Strike = Callable[[Call, Act, Act], Any]


def kind_of(path: object) -> str:
    """What a file or folder of a run is."""
    name = Path(os.fsdecode(path)).name  # type: ignore[arg-type]
    return next((kind for start, kind in KINDS.items() if name.startswith(start)), "root")


class Point(NamedTuple):
    """A place in a save, as people name it.

    Attributes:
        when: ``"before"`` or ``"after"`` the call, or ``"within"`` it.
        nth: of the same calls of this rank.
    """

    op: str
    what: str
    when: str
    nth: int = 0

    def __str__(self) -> str:
        which = "" if self.nth == 0 else f" {self.nth}"
        return f"{self.when} {self.op}{which} of {self.what}"


@dataclass(frozen=True)
class KillAt:
    """Kill this process at a point, or at a call by its number."""

    point: Point | None = None
    number: int = -1
    when: str = "before"

    def __call__(self, call: Call, act: Act, part: Act) -> Any:
        point = self.point
        if point is None:
            if call.number != self.number:
                return act()
            when = self.when
        else:
            if (call.op, call.what, call.nth) != (point.op, point.what, point.nth):
                return act()
            when = point.when
        if when != "before":
            (act if when == "after" else part)()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("this process is dead")


@dataclass
class FailAt:
    """Fail at the call of one rank that has this number, or has the same op from there on.

    Attributes:
        error: what is raised instead of an ``OSError``.
        stays: whether all later calls of the same op on this rank fail, too, as on a full disk.
        call: what it has struck.
    """

    rank: int
    number: int
    errno: int = 0
    error: BaseException | None = None
    stays: bool = False
    call: Call | None = None

    def __call__(self, call: Call, act: Act, part: Act) -> Any:
        first = self.call is None and (call.rank, call.number) == (self.rank, self.number)
        alike = self.call is not None and (call.rank, call.op) == (self.rank, self.call.op)
        again = self.stays and alike
        if not first and not again:
            return act()
        self.call = self.call or call
        if self.error is not None:
            raise self.error
        # As the operating system: calls that take a descriptor know no name.
        by_name = call.op in ("open", "mkdir", "rename", "scandir", "unlink", "rmtree")
        raise OSError(self.errno, os.strerror(self.errno), *([call.path] if by_name else []))

    def __str__(self) -> str:
        where = "nothing" if self.call is None else f"{self.call.op} of {self.call.what}"
        return f"errno {self.errno} at call {self.number} of rank {self.rank}: {where}"


def lets(call: Call, act: Act, part: Act) -> Any:
    """Strike nothing."""
    return act()


@dataclass
class Disk:
    """What ``checkpoint.files`` uses while this is entered. A context manager."""

    strike: Strike = lets
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.paths: dict[int, str] = {}
        self._lock = threading.Lock()
        self._counts: Counter[object] = Counter()
        self.os, self.shutil, self.fcntl = _Os(self), _Shutil(self), _Fcntl(self)

    def __enter__(self) -> Self:
        files.os, files.shutil, save_lock.os = self.os, self.shutil, self.os
        atomic_files.os, atomic_files.shutil = self.os, self.shutil
        file_lock.fcntl = self.fcntl
        return self

    def __exit__(self, *_: object) -> None:
        files.os, files.shutil, save_lock.os = os, shutil, os
        atomic_files.os, atomic_files.shutil = os, shutil
        file_lock.fcntl = fcntl

    def aim(self, strike: Strike) -> None:
        """Count from 0 again, with another strike."""
        self.strike = strike
        self.calls.clear()
        self._counts.clear()

    def of(self, rank: int) -> list[Call]:
        """The calls of one rank."""
        return [call for call in self.calls if call.rank == rank]

    def do(self, op: str, path: object, act: Act, part: Act | None = None) -> Any:
        """Note a call and let the strike do it."""
        what, rank = kind_of(path), _rank(str(path))
        with self._lock:
            nth, number = self._counts[rank, op, what], self._counts[rank]
            self._counts.update([(rank, op, what), rank])
            call = Call(op, what, nth, rank, number, os.fsdecode(path))  # type: ignore[arg-type]
            self.calls.append(call)
        return self.strike(call, act, part or act)


def _rank(path: str) -> int:
    """Whose call it is: by the thread of a simulated rank, beside such a thread by the file."""
    name = threading.current_thread().name
    if name.startswith("rank "):
        return int(name.split()[1])
    file = Path(path).name
    return int(file[5:10]) if file.startswith("rank-") else 0


class _Os:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: Any, *rest: Any) -> int:
        def act() -> int:
            fd = os.open(path, *rest)
            self._disk.paths[fd] = os.fsdecode(path)
            return fd

        return int(self._disk.do("open", path, act))

    def _by_fd(self, op: str, fd: int, act: Act, part: Act | None = None) -> Any:
        return self._disk.do(op, self._disk.paths.get(fd, "?"), act, part)

    def write(self, fd: int, data: Any) -> Any:
        half = max(1, len(data) // 2)
        return self._by_fd(
            "write", fd, lambda: os.write(fd, data), lambda: os.write(fd, data[:half])
        )

    def preadv(self, fd: int, *rest: Any) -> Any:
        return self._by_fd("preadv", fd, lambda: os.preadv(fd, *rest))

    def fsync(self, fd: int) -> Any:
        return self._by_fd("fsync", fd, lambda: os.fsync(fd))

    def fstat(self, fd: int) -> Any:
        return self._by_fd("fstat", fd, lambda: os.fstat(fd))

    def close(self, fd: int) -> None:
        os.close(fd)  # not a call that fails for a reason of its own

    def rename(self, source: Any, target: Any) -> Any:
        return self._disk.do("rename", source, lambda: os.rename(source, target))

    def mkdir(self, path: Any, *rest: Any) -> Any:
        return self._disk.do("mkdir", path, lambda: os.mkdir(path, *rest))

    def makedirs(self, path: Any, *rest: Any, **named: Any) -> Any:
        return self._disk.do("mkdir", path, lambda: os.makedirs(path, *rest, **named))

    def unlink(self, path: Any) -> Any:
        return self._disk.do("unlink", path, lambda: os.unlink(path))

    def scandir(self, path: Any) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = self._disk.do(
            "scandir", path, lambda: os.scandir(path)
        )
        return found


class _Shutil:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def rmtree(self, path: Any) -> Any:
        def part() -> None:
            """Remove the first file."""
            with os.scandir(path) as entries:
                os.unlink(sorted(entry.path for entry in entries)[0])

        return self._disk.do("rmtree", path, lambda: shutil.rmtree(path), part)


class _Fcntl:
    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(fcntl, name)

    def flock(self, fd: int, how: int) -> Any:
        op = "unlock" if how == fcntl.LOCK_UN else "lock"
        return self._disk.do(op, self._disk.paths.get(fd, "?"), lambda: fcntl.flock(fd, how))
