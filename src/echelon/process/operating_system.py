"""What not every operating system has, for code that runs on all of them.

Local processes over shared memory need Linux: its memfds, futexes and ``/proc``. Simulated ranks,
and processes that torchrun starts over gloo, run on macOS and Windows as well. So the code that
they share asks here, and does without.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from echelon.errors import UnsupportedError


def require_linux(what: str) -> None:
    """Refuse what needs Linux on other systems.

    Raises:
        UnsupportedError: this is no Linux.
    """
    if sys.platform != "linux":
        raise UnsupportedError(
            f"{what} need Linux, and this is {sys.platform}: take simulated ranks "
            '(world="threads", or --world threads), or start the script with torchrun and call '
            'ec.init("gloo")'
        )


def at_fork(**callbacks: Callable[[], object]) -> None:
    """``os.register_at_fork``, which a system without forks does not have."""
    if sys.platform != "win32":
        os.register_at_fork(**callbacks)


def num_processors() -> int:
    """How many processors this process may use; those of the machine if only that is known."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def signals_named(*names: str) -> tuple[signal.Signals, ...]:
    """Those of the signals that there are here.

    Example:
        >>> [each.name for each in signals_named("SIGTERM", "SIGNONE")]
        ['SIGTERM']
    """
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


def c_function(name: str) -> Any:
    """A function of the C library, which sets ``ctypes.get_errno()``; None where there is none."""
    if sys.platform == "win32":
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)
