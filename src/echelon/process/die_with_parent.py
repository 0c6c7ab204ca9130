"""Processes that the kernel ends when the one that started them has ended.

Also a program: ``python -I -S die_with_parent.py PARENT COMMAND...`` becomes the command, which is
killed when the process PARENT ends. It is run by its path before every rank, so it imports next to
nothing.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import signal
import sys

_PR_SET_PDEATHSIG = 1


def signal_on_death_of_parent(parent: int, number: signal.Signals) -> None:
    """Have this process get a signal when the thread that started it ends.

    That is the thread, not the process: start such processes from the main thread. It holds over an
    ``exec``, and not for children. Does nothing where the system is not Linux.

    Args:
        parent: the process that started this one; if it has ended already, the signal comes now.
        number: the signal.

    Raises:
        OSError: the kernel refused.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def die_with_pipe(descriptor: int) -> None:
    """Have the kernel kill this process when nobody holds the other end of a pipe any more.

    For a process whose parent is a fork server, which ends only when all its children have: they
    hold its own life line. So the death of the process that asked for the child must reach it
    directly, even if it is stopped or in native code.
    """
    fcntl.fcntl(descriptor, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([descriptor], [], [], 0)[0]:  # it was let go of before we asked for the signal
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    signal_on_death_of_parent(int(sys.argv[1]), signal.SIGKILL)
    os.execv(sys.argv[2], sys.argv[2:])
