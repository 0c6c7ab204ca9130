"""Processes that the kernel ends when the one that started them has ended.

Also a program: ``python -I -S tether.py PARENT COMMAND...`` becomes the command, tethered to the
process PARENT. It is run by its path before every rank, so it imports next to nothing.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def tether(parent: int, number: signal.Signals) -> None:
    """Have this process get a signal when the thread that started it ends.

    That is the thread, not the process: start tethered processes from the main thread. It holds
    over an ``exec``, and not for children. Does nothing where the system is not Linux.

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


if __name__ == "__main__":
    tether(int(sys.argv[1]), signal.SIGKILL)
    os.execv(sys.argv[2], sys.argv[2:])
