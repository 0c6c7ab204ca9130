"""Where the threads of this process are now."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

from echelon.process.operating_system import at_fork

# Before 3.11.9, Python may collect garbage while it lists the frames, with a lock that a thread
# which starts or ends waits for while it has the interpreter: the process hangs (CPython's issue
# 106883). Code that runs in a collection, as ours that measures it, makes that likely.
_lock = threading.RLock()
at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of each thread by its number, as ``sys._current_frames`` has them.

    Example:
        >>> current_frames()[threading.get_ident()].f_code.co_name
        'current_frames'
    """
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()
