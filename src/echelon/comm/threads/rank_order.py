"""In which order simulated ranks run: what their world asks of it.

A world asks before a rank waits for others, and when its wait has ended. Ranks run one at a time
(``turns``).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import final

from echelon.errors import StateError


class RankOrder(ABC):
    """When each rank of a world runs.

    The caller of a method holds ``lock``, unless the method says otherwise.

    Args:
        size: the number of ranks.

    Attributes:
        lock: of the world.
        asking_thread: the thread whose debugger asks for a command, if one does.
        when_rank_runs: called by each rank on its thread before it goes on, with the lock, if a
            debugger has breakpoints.
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()  # whose conditions wait without Python code of their own
        self._wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self.asking_thread: int | None = None
        self._in_a_hurry = False
        self.when_rank_runs: Callable[[], None] | None = None

    @final
    def require_running(self, call: object) -> None:
        """Refuse a call that a user has typed, as long as no other rank runs. Needs no lock.

        Raises:
            StateError: the debugger of the calling thread asks for commands.
        """
        if self.asking_thread == threading.get_ident():
            raise StateError(f"{call} needs other ranks, which are stopped: step over the line (n)")

    @abstractmethod
    def sleep(self, rank: int, seconds: float, patience_s: float) -> None:
        """Let others run until this rank is woken, or for some seconds at most.

        Args:
            patience_s: how long one of them may keep this rank from running.
        """

    @abstractmethod
    def resume(self, rank: int, *, overtake: bool = False) -> None:
        """Return when the rank may run after ``sleep``, on the thread that has slept.

        Args:
            overtake: do not wait long for a rank that does not hand on, since the world fails.
        """

    @abstractmethod
    def wake(self, rank: int, threads: Iterable[int]) -> None:
        """These threads of a rank, which sleep, have what they wait for."""

    @abstractmethod
    def yield_turn(self, rank: int, patience_s: float | None = None) -> None:
        """Let others run before the rank asks again whether something is complete. Without lock.

        Args:
            patience_s: as for ``sleep``; None: that of a rank that is in no call.
        """

    @final
    def hurry(self) -> None:
        """Let no rank wait long before it runs from now on, since the world has failed."""
        self._in_a_hurry = True
        for wakeup in self._wakeups:
            wakeup.notify_all()

    @abstractmethod
    def clock(self, rank: int) -> int:
        """The nanoseconds of a rank: as if each rank had a core of its own. Needs no lock."""

    @abstractmethod
    def advance_clock(self, rank: int, nanoseconds: int) -> None:
        """Let the clock of the rank show at least ``nanoseconds``."""

    @abstractmethod
    def idle_ns(self) -> int:
        """The nanoseconds in which the clock of no rank has run. Needs no lock."""

    @abstractmethod
    def is_next(self, rank: int) -> bool:
        """Whether a rank does not run only because it is not its turn."""

    @abstractmethod
    def not_running(self, rank: int) -> str | None:
        """Why a rank does not run that waits for nobody; None if it does, or blocks by itself."""
