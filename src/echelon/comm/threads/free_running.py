"""Simulated ranks that run at the same time, each on its own thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import final

import torch

from echelon.comm.threads.cached_properties import without_locks
from echelon.comm.threads.default_dtype import own_default_dtype
from echelon.comm.threads.own_functions import own_functions
from echelon.comm.threads.randomness import random_stream
from echelon.comm.threads.rank_order import RankOrder, do_nothing
from echelon.comm.threads.running_time import running_ns, running_s
from echelon.comm.threads.transformers_contexts import own_contexts


@final
class FreeRunning(RankOrder):
    """Ranks run whenever the machine lets them, so what they print or share comes in any order.

    Each rank has a random stream of torch, a default dtype and functions of its own. Other globals
    of the process are shared.
    """

    has_clocks = False

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._dtype = torch.get_default_dtype()
        self._holding: int | None = None  # the rank that runs alone
        self._held: set[int] = set()  # those that have stopped for it

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Run the body as this rank, on the calling thread."""
        with (
            own_default_dtype(self._dtype) as dtype,
            own_functions(),
            own_contexts(),
            without_locks.of_rank(),
            random_stream(dtype),
        ):
            yield

    def sleep(self, rank: int, seconds: float) -> None:
        """Return when the rank is woken, or after some seconds."""
        self._doze(rank, seconds)

    def resume(self, rank: int, *, overtake: bool = False) -> None:
        """Return at once, unless another rank runs alone."""
        if self._holding is not None:
            try:
                while self._holding not in (None, rank) and not self._in_a_hurry:
                    self._held.add(rank)
                    self._doze(rank)
            finally:
                self._held.discard(rank)
        self.when_rank_runs()

    def goes_on(self) -> bool:
        """Unless another rank runs alone, or a debugger wants to know of each rank that goes on."""
        return self._holding is None and self.when_rank_runs is do_nothing

    @contextmanager
    def hold(self, rank: int) -> Iterator[None]:
        """Stop each other rank in the body, at its next call of a group."""
        with self.lock:
            self.resume(rank)  # one after another
            outermost, self._holding = self._holding is None, rank
        try:
            yield
        finally:
            with self.lock:
                if outermost:
                    self._holding = None
                for wakeup in self._wakeups:
                    wakeup.notify_all()

    def wake(self, rank: int, threads: Iterable[int]) -> None:
        """Wake the threads of this rank."""
        self._wakeups[rank].notify_all()

    def pause(self, rank: int) -> None:
        """Return at once: others run anyway."""

    def close(self) -> None:
        """Do nothing: each rank has restored what it had for itself."""

    def clock(self, rank: int) -> float:
        """The same for all ranks."""
        return running_s()

    def clock_of(self, rank: int) -> Callable[[], int]:
        """The same for all ranks."""
        return running_ns

    def advance_clock(self, rank: int, seconds: float) -> None:
        """Change nothing: all ranks have one clock."""

    def idle_s(self) -> float:
        """Nothing: the clock always runs."""
        return 0.0

    def is_next(self, rank: int) -> bool:
        """Never: every rank runs."""
        return False

    def not_running(self, rank: int) -> str | None:
        """That it has stopped for another rank, if it has."""
        return "stopped before its next call" if rank in self._held else None

    def watch(self) -> None:
        """Do nothing: no rank can keep another from running."""

    def long_turn(self, seconds: float) -> None:
        """None: no rank can keep another from running."""
