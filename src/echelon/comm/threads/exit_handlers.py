"""The end of a process in which simulated ranks have left threads or exit handlers that never end.

Python waits at the end of a script for threads that are not daemons, and then calls exit handlers
in reverse order. Those that simulated ranks have started or registered get a time limit here,
because simulated ranks have no processes of their own that could be killed. Those of the rest of
the program may take any time.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

from echelon.diagnosis import stacks
from echelon.diagnosis.exit_guard import awaited_threads
from echelon.diagnosis.stuck_ranks import NO_PYTHON
from echelon.errors.message_text import say
from echelon.process import time_limits
from echelon.process.background_threads import run_in_background
from echelon.process.process_end import end_now
from echelon.process.process_status import activity

_PAUSE_S = 0.2


@final
class _Guard:
    """Ends this process if simulated ranks have left something in it that does not end."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.limit_s = 0.0
        self.threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # of the ranks
        self._thread: threading.Thread | None = None
        self._passed = threading.Event()

    def start(self, limit_s: float) -> None:
        """Guard the end of the process, which may take ``limit_s`` seconds."""
        with self.lock:
            self.limit_s = max(self.limit_s, limit_s)
            if self._thread is None:
                atexit.register(self._passed.set)  # runs after the handlers of ranks
                self._thread = run_in_background(
                    "echelon exit guard", self._watch, until_the_end=True
                )

    def _watch(self) -> None:
        main = threading.main_thread()
        main.join()
        since_s = time.monotonic()
        while not self._passed.wait(_PAUSE_S):
            others = [thread for thread in awaited_threads() if thread not in self.threads]
            if others:  # the program itself is still running
                since_s = time.monotonic()
            elif time.monotonic() - since_s > self.limit_s:
                self._end()

    def _end(self) -> None:
        left = awaited_threads()
        thread = left[0] if left else threading.main_thread()
        what = f"the thread {thread.name!r}" if left else "an exit handler"
        say(
            f"echelon: the script has ended, but {what} of a simulated rank "
            f"{activity(os.getpid(), thread.native_id or 0)}; it had {self.limit_s:.1f} s to end",
            *stacks.stack_rows(stacks.of_this_process(thread.ident or 0), NO_PYTHON),
        )
        end_now(1, flush_s=time_limits.FLUSH_S)


_guard = _Guard()


def guard_exit(timeout_s: float) -> None:
    """Guard the end of this process; call it before simulated ranks run."""
    _guard.start(timeout_s + time_limits.LEFT_BEHIND_S)


@contextmanager
def guarded_exit(timeout_s: float) -> Iterator[None]:
    """Run simulated ranks in the body; threads that they leave get ``timeout_s`` to end."""
    guard_exit(timeout_s)
    before = set(awaited_threads())
    try:
        yield
    finally:
        _guard.threads.update(set(awaited_threads()) - before)
