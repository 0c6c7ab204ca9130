"""Replacements in the process that last as long as any simulated rank runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self, final

from echelon.process.replacement import Replacement


@final
class Installation:
    """A replacement that each rank installs when it starts, and that the last one removes.

    ``install`` is called for each rank, also if others run already. ``remove`` is called when the
    last rank ends.
    """

    def __init__(self, install: Callable[[], None], remove: Callable[[], None]) -> None:
        self._install, self._remove = install, remove
        self._lock = threading.Lock()
        self._num_ranks = 0

    @classmethod
    def of(cls, *replacements: Replacement) -> Self:
        """What installs and removes these."""

        def install() -> None:
            for each in replacements:
                each.put_in()

        def remove() -> None:
            for each in replacements:
                each.take_out()

        return cls(install, remove)

    @contextmanager
    def of_rank(self) -> Iterator[None]:
        """Count the body as a rank that runs."""
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
