"""Which simulated ranks run, and how long each of them has waited: what all orders have in common.

A world asks its order before a rank waits for others, and when its wait has ended. Ranks that take
turns run one at a time (``turns``); concurrent ranks run whenever the machine lets them
(``free_running``).
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, final

from echelon.comm.threads.process_state import wait_for
from echelon.errors import StateError


class RankOrder(ABC):
    """When each simulated rank of a world runs.

    The caller of a method holds ``lock``, unless the method says otherwise.

    Args:
        size: the number of ranks.

    Attributes:
        has_clocks: whether each rank has a clock of its own.
        lock: of the world.
        asking_thread: the thread whose debugger asks for a command, if one does.
        when_rank_runs: called by each rank on its thread before it goes on, with the lock.
    """

    has_clocks = True

    def __init__(self, size: int) -> None:
        self.lock = threading.Lock()
        self._wakeups = [threading.Condition(self.lock) for _ in range(size)]
        self.asking_thread: int | None = None
        self._in_a_hurry = False
        self.when_rank_runs: Callable[[], None] = do_nothing

    @final
    def require_running(self, call: object) -> None:
        """Refuse a call that a user has typed, as long as no other rank runs. Needs no lock.

        Raises:
            StateError: the debugger of the calling thread asks for commands.
        """
        if self.asking_thread == threading.get_ident():
            raise StateError(f"{call} needs other ranks, which are stopped: step over the line (n)")

    @abstractmethod
    def of_rank(self, rank: int) -> AbstractContextManager[None]:
        """Run the body as this rank, on the calling thread. Without the lock."""

    @abstractmethod
    def sleep(self, rank: int, seconds: float) -> None:
        """Let others run until this rank is woken, or for some seconds at most."""

    @abstractmethod
    def resume(self, rank: int, *, overtake: bool = False) -> None:
        """Return when the rank may run after ``sleep``, on the thread that has slept.

        Args:
            overtake: do not wait long for a rank that does not hand on, since the world fails.
        """

    def goes_on(self) -> bool:
        """Whether ``resume`` and ``advance_clock`` would do nothing now. Needs no lock."""
        return False

    @abstractmethod
    def wake(self, rank: int, threads: Iterable[int]) -> None:
        """These threads of a rank, which sleep, have what they wait for."""

    @abstractmethod
    def pause(self, rank: int) -> None:
        """Let others run before the rank asks again whether something is complete. Without lock."""

    @abstractmethod
    def hold(self, rank: int) -> AbstractContextManager[None]:
        """Let no other rank run in the body, which this rank runs. Without the lock."""

    @final
    def hurry(self) -> None:
        """Let no rank wait long before it runs from now on, since the world has failed."""
        self._in_a_hurry = True
        for wakeup in self._wakeups:
            wakeup.notify_all()

    @abstractmethod
    def close(self) -> None:
        """Leave the process as it was before ranks ran. Without the lock."""

    @abstractmethod
    def clock(self, rank: int) -> float:
        """The seconds of a rank: as if each rank had a core of its own. Needs no lock."""

    def clock_of(self, rank: int) -> Callable[[], int]:
        """The clock of a rank in nanoseconds, which needs no lock."""
        return lambda: int(1e9 * self.clock(rank))

    @abstractmethod
    def advance_clock(self, rank: int, seconds: float) -> None:
        """Let the clock of the rank show at least ``seconds``, if it has one."""

    @abstractmethod
    def idle_s(self) -> float:
        """The seconds in which the clock of no rank has run. Needs no lock."""

    @abstractmethod
    def is_next(self, rank: int) -> bool:
        """Whether a rank does not run only because it is not its turn."""

    @abstractmethod
    def not_running(self, rank: int) -> str | None:
        """Why a rank does not run that waits for nobody; None if it does, or blocks by itself."""

    @abstractmethod
    def watch(self) -> None:
        """Look whether a rank keeps others from running; called now and then, without the lock."""

    @abstractmethod
    def long_turn(self, seconds: float) -> tuple[int, list[int]] | None:
        """The rank that has kept others from running for so long, and these others, if any."""

    @final
    def _doze(self, rank: int, seconds: float | None = None) -> bool:
        """Release the lock until this rank is woken; whether it was before time was up."""
        return wait_for(self._wakeups[rank], seconds)


def do_nothing() -> None:
    """Unless a debugger has breakpoints."""


_current = threading.local()  # .owner of what runs on a thread, and .take_back of its turn


def current_owner() -> Any:
    """Whose state the calling thread has: that of a rank which takes turns, or None."""
    return getattr(_current, "owner", None)


def set_current_owner(owner: Any, take_back: Callable[[], None] | None = None) -> None:
    """Say whose state the calling thread has from now on.

    Args:
        owner: the state; None for a thread that is no rank.
        take_back: what ``take_turn`` calls on this thread.
    """
    _current.owner, _current.take_back = owner, take_back


def take_turn() -> None:
    """Wait for the turn of the rank on the calling thread, if it was overtaken."""
    take_back: Callable[[], None] | None = getattr(_current, "take_back", None)
    if take_back is not None:
        take_back()
