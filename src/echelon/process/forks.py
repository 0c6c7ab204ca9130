"""A process that a rank forks is no rank: it owns nothing of the world that it has a copy of.

The copy holds the same connections, shared memory and pipes. Without care its end would close the
world of the rank, its calls would take the rank's turn, and its result would be sent in the rank's
name. So after a fork the copies are disowned, once, in the child; a rank pays nothing in its calls.
"""

from __future__ import annotations

import ctypes
import os
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, final

from echelon.errors import StateError
from echelon.errors.message_text import standard_error
from echelon.process.operating_system import at_fork
from echelon.process.process_end import end_now, exit_code_of, exit_text_of


class Owned(Protocol):
    """Something of a rank that a process which it forks must let go of."""

    def disown(self) -> None:
        """Called in the forked process, in which no other thread runs yet."""


@final
class ForkMark:
    """Stands for this process; a forked one has another. Compared by identity."""


_mark = ForkMark()
_owned: weakref.WeakSet[Owned] = weakref.WeakSet()


def mark() -> ForkMark:
    """The mark of this process."""
    return _mark


def disown_in_forks(owned: Owned) -> None:
    """Have ``owned.disown()`` called in every process that this one forks."""
    _owned.add(owned)


def keep_alive(item: object) -> None:
    """Never take ``item`` apart in this process.

    The end of an engine of torch waits for threads that a fork does not have, and takes
    connections out of a table of the kernel that the rank still uses.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(item))


def refused(what: str, rank: int) -> StateError:
    """The error for a call of a forked process; ``rank`` (in the job) has forked it."""
    return StateError(
        f"{what} is called in process {os.getpid()}, which rank {rank} has forked: a forked "
        "process is no rank and cannot communicate. Make the call in the rank itself, and send "
        "the child's result to it, as multiprocessing does"
    )


@contextmanager
def ends_forks() -> Iterator[None]:
    """End a process here that was forked in the body: what follows is the rank's own."""
    before = _mark
    code = 0
    try:
        yield
    except SystemExit as end:
        if before is _mark:
            raise
        if text := exit_text_of(end):
            print(text, file=standard_error())
        code = exit_code_of(end)
    except BaseException:
        if before is _mark:
            raise
        traceback.print_exc()
        code = 1
    if before is not _mark:
        end_now(code)


def _disown() -> None:
    global _mark
    _mark = ForkMark()
    for owned in list(_owned):
        owned.disown()
    _owned.clear()


at_fork(after_in_child=_disown)
