"""What simulated ranks replace in their process: there while any of them runs, and then gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final


@final
class Installation:
    """Something that each rank installs when it begins, and the last one to end removes.

    Args:
        install: called for each rank, so it finds its work done where others run already.
        remove: called when no rank is left.
        lock: held by both calls; its own if None.
    """

    def __init__(
        self,
        install: Callable[[], None],
        remove: Callable[[], None],
        lock: threading.Lock | threading.RLock | None = None,
    ) -> None:
        self._install, self._remove = install, remove
        self._lock = lock or threading.Lock()
        self._num_ranks = 0

    def __bool__(self) -> bool:
        """Whether a rank runs."""
        return self._num_ranks > 0

    @contextmanager
    def of_rank(self) -> Iterator[None]:
        """Have it in the process while the body runs, at least."""
        with self._lock:
            self._num_ranks += 1
            self._install()
        try:
            yield
        finally:
            with self._lock:
                self._num_ranks -= 1
                if not self._num_ranks:
                    self._remove()
