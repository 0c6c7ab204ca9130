"""Simulated ranks take turns: one of them runs Python at a time, always in the same order.

Libraries change globals of a process for a while, which is safe as long as nothing else runs. So a
rank runs until it waits for others, and hands on to the next rank that can go on, in cyclic order::

    rank 0  F────all_reduce·              ·──optimizer──all_reduce·
    rank 1          F────all_reduce·                             ·──optimizer──
    rank 2                    F────all_reduce──optimizer──…   [1] the last to come goes on

What happens to a rank::

    take turn  wait until the turn is this rank's, and put its state into the process
    hand on    give the turn to the next rank that wants one
    sleep      hand on until another rank wakes this one, or time is up, and ``resume`` then
    wake       let a rank that sleeps want a turn again
    yield      hand on, and want a turn again at once
    overtake   take the turn from a rank that does not hand on
    hold       let no rank run while somebody looks at them
    hurry      wait for no other rank long any more, since the world has failed

Law: which rank runs next depends only on what the ranks have done, and not on clocks. The
exceptions are limits of time, and ranks that block outside of groups.

[Note: a rank that does not hand on]
A rank may block in something else than a group. In Python's own waits it hands on after a while
(``blocking_calls``). If it blocks in C code, others get their turns after ``BLOCKED_S`` in which
nothing of this process has run, nor any process that it has started, and the rank is warned when it
next meets a group, because its random streams and other globals may be those of another rank until
then. A rank that a busy machine does not let run is not overtaken. If it computes in one turn for
as long as one of the others may wait in the call that it is in, or outside of calls for as long as
ranks of the world may, it is an error, as if the other waited for it. Ranks whose world has failed,
or fails now because their time is up, run after ``OVERTAKE_S`` in any case. A rank that was
overtaken waits for a turn when it next meets a group.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from _thread import allocate_lock
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final

from echelon.comm.threads import global_hooks  # noqa: F401  # registers state
from echelon.comm.threads.blocking_calls import handing_on, renew_grace
from echelon.comm.threads.cached_properties import without_locks
from echelon.comm.threads.clocks import Clocks
from echelon.comm.threads.kept_by_threads import keeping_threads
from echelon.comm.threads.output_names import own_loggers
from echelon.comm.threads.process_state import OUTSIDE, StateOwner
from echelon.comm.threads.rank_threads import RankThread, this_rank
from echelon.comm.threads.replaced_names import watching_imports
from echelon.errors import StateError
from echelon.process.operating_system import at_fork
from echelon.process.process_status import others_work
from echelon.process.this_rank import here

OVERTAKE_S = 0.2
BLOCKED_S = 2.0
_BUSY = 0.1  # the share of a core that a process uses at least if its rank does not block


@final
class Wakeup:
    """What threads of one rank wait for: a condition whose methods cost a third of Python's own.

    Args:
        lock: held by the caller of a method, once, and free while a thread waits.
    """

    def __init__(self, lock: AbstractContextManager[bool]) -> None:
        self._lock: Any = lock
        self._waiting: list[Any] = []  # a lock for each thread

    def wait(self, seconds: float | None = None) -> bool:
        """Return whether the thread was woken, if necessary after so many seconds."""
        woken, lock = allocate_lock(), self._lock
        woken.acquire()
        self._waiting.append(woken)
        lock.release()
        is_woken = False
        try:
            is_woken = woken.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            lock.acquire()
            if not is_woken and woken in self._waiting:
                self._waiting.remove(woken)
        return is_woken

    def wake(self) -> None:
        """Let all threads go on that wait."""
        for woken in self._waiting:
            woken.release()
        self._waiting.clear()


@final
class Turns:
    """Ranks run one at a time, from one wait to the next.

    The caller of a method holds ``lock``, unless the method says otherwise.

    Args:
        size: the number of ranks.

    Attributes:
        lock: of the world.
        clocks: of the ranks.
        asking_thread: the thread whose debugger asks for a command, if one does.
        when_rank_runs: called by each rank on its thread before it goes on, with the lock, if a
            debugger has breakpoints.
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.clocks = Clocks(size)
        self._wakeups = [Wakeup(self.lock) for _ in range(size)]
        self.asking_thread: int | None = None
        self.when_rank_runs: Callable[[], None] | None = None
        self._in_a_hurry = False
        self._size = size
        rank = this_rank()
        self._starter = starter = OUTSIDE if rank is None else rank.state
        # Wherever the lock is free, the holder wants no turn; if there is none, nobody wants one.
        # The rank that runs is the holder, or was overtaken. It runs while this world has the
        # process, except in ``held``.
        self._has_process = False  # whether this world holds the lock of the process
        self._holder: int | None = 0  # the rank whose turn it is
        self._running: int | None = None  # the holder, once its thread has noticed
        self._wanting = set(range(1, size))
        self._patience_s: dict[int, float] = {}  # of ranks that are in a call and have handed on
        self._overtaken: set[int] = set()
        self._closed = False
        self._turn = 0  # counts the turns
        self._turn_since_ns = 0  # when the holder began to run, by the clock of the world
        self._threads = [0] * size
        self._looked = (-1, 0, 0)  # at which turn, when, and with how much processor time
        starter.lock.acquire(self)
        try:
            self._owners = [StateOwner(starter) for _ in range(size)]
        finally:
            starter.lock.release(self)

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """Run the body as this rank, on the calling thread, when it is its turn.

        Raises:
            StateError: the world was left, as by Ctrl-C, before the first turn of the rank.
        """
        with self.lock:
            self._threads[rank] = threading.get_ident()
            self._take_turn(rank)
            was_left = self._closed  # so the process has the state of the caller again
        resume = partial(self._resume_if_overtaken, rank)
        here.rank = RankThread(rank, self, self._owners[rank], resume)
        try:
            if was_left:
                raise StateError(f"rank {rank} does not start, because its world was left")
            with (
                without_locks.needed(),
                watching_imports.needed(),
                keeping_threads.needed(),
                own_loggers.needed(),
                handing_on(lambda: self._blocked(rank)),
            ):
                yield
        finally:
            here.rank = None
            with self.lock:
                self._threads[rank] = 0
                self.clocks.stop(rank)
                self._overtaken.discard(rank)
                self._wanting.discard(rank)
                if self._holder == rank:
                    self._hand_on(rank)

    def close(self) -> None:
        """Give the process back the state of the code that has started the world."""
        with self.lock:
            self._closed = True
        self._starter.lock.acquire(self)
        try:
            self._starter.load()
        finally:
            self._starter.lock.release(self)

    # Waiting ---------------------------------------------------------------------------------

    def require_running(self, call: object) -> None:
        """Refuse a call that a user has typed, as long as no other rank runs. Needs no lock.

        Raises:
            StateError: the debugger of the calling thread asks for commands.
        """
        if self.asking_thread == threading.get_ident():
            raise StateError(f"{call} needs other ranks, which are stopped: step over the line (n)")

    def sleep(self, rank: int, seconds: float, patience_s: float) -> None:
        """Hand on, if this thread has the turn, until the rank is woken, or for some seconds.

        Args:
            patience_s: how long another rank may keep this one from running.
        """
        if self._has_turn(rank):
            self._patience_s[rank] = patience_s
            self.clocks.stop(rank)
            self._hand_on(rank)
        self._wakeups[rank].wait(seconds)

    def resume(self, rank: int, *, overtake: bool = False) -> None:
        """Return when it is the turn of the rank, unless this is another one of its threads.

        Args:
            overtake: do not wait long for a rank that does not hand on, since the world fails.
        """
        if self._threads[rank] != threading.get_ident() or self._running == rank:
            return
        renew_grace()
        was_overtaken = rank in self._overtaken and not self._in_a_hurry
        if self.clocks.since_ns[rank] is not None:  # it has not slept
            self.clocks.stop(rank)
        self._take_next_turn(rank, overtake=overtake)
        if was_overtaken:
            warnings.warn(
                f"rank {rank} was blocked for {BLOCKED_S:g} s outside of echelon's calls, so other "
                "simulated ranks ran meanwhile, and from then on until now: random streams and "
                "other state of the process may have been those of another rank",
                RuntimeWarning,
                stacklevel=2,
            )

    def _resume_if_overtaken(self, rank: int) -> None:
        if rank in self._overtaken:
            with self.lock:
                self.resume(rank)

    def wake(self, rank: int, threads: Iterable[int]) -> None:
        """Let the rank have a turn, if one of these threads, which sleep, takes its turns."""
        takes_turns = self._threads[rank]
        for thread in threads:
            if thread != takes_turns:
                self._wakeups[rank].wake()
            elif self._holder != rank:
                self._wanting.add(rank)  # to wake it before its turn would only cost time
                if self._holder is None:
                    self._hand_on(rank)

    def yield_turn(self, rank: int, patience_s: float | None = None) -> None:
        """Let all others that want have their turns, before the rank asks again. Without lock.

        Args:
            patience_s: as for ``sleep``; None: that of a rank that is in no call.
        """
        with self.lock:
            if self._has_turn(rank) and self._wanting:
                if patience_s is not None:
                    self._patience_s[rank] = patience_s
                self.clocks.stop(rank)
                self._wanting.add(rank)
                self._hand_on(rank)
                self._take_next_turn(rank)

    def hurry(self) -> None:
        """Let no rank wait long before it runs from now on, since the world has failed."""
        self._in_a_hurry = True
        for wakeup in self._wakeups:
            wakeup.wake()

    @contextmanager
    def _blocked(self, rank: int) -> Iterator[None]:
        """Let others run in the body, in which the rank blocks in something else than a group."""
        with self.lock:
            hands_on = self._has_turn(rank)
            if hands_on:
                self._hand_on(rank)  # its clock goes on as long as it blocks
        try:
            yield
        finally:
            if hands_on:
                with self.lock:
                    self.clocks.stop(rank)
                    self._take_next_turn(rank)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold all ranks in the body, which the rank whose turn it is waits in.

        No clock runs meanwhile, and the process has the state of the code that has started the
        world, which may start others. A thread that has no turn stops the clocks only.
        """
        with self.lock:
            rank = self._running
            has_turn = rank is not None and self._has_turn(rank)
            self.clocks.hold()
            if has_turn and not self._closed:
                self._starter.load()
                self._release_process()
        try:
            yield
        finally:
            with self.lock:
                try:
                    if has_turn and not self._closed:
                        self._acquire_process()
                    if has_turn and rank is not None and not self._closed:
                        self._owners[rank].load()
                finally:
                    self.clocks.let_go()

    # Turns -----------------------------------------------------------------------------------

    def is_next(self, rank: int) -> bool:
        """Whether the rank waits for its turn, or has been given it and has not noticed yet."""
        return rank in self._wanting or (self._holder == rank != self._running)

    def _has_turn(self, rank: int) -> bool:
        return self._running == rank and self._threads[rank] == threading.get_ident()

    def _hand_on(self, rank: int) -> None:
        """Give the turn to the next rank after this one that wants it."""
        self._turn += 1
        self._running = None
        if not self._wanting:
            self._holder = None
            self._release_process()
            self.clocks.note_turn(is_free=True)
            return
        if self._holder is None:
            self.clocks.note_turn(is_free=False)
        self._holder = min(self._wanting, key=lambda other: (other - rank - 1) % self._size)
        self._wanting.discard(self._holder)
        if self._starter.lock.is_wanted():
            self._release_process()
        self._wakeups[self._holder].wake()

    def _take_turn(self, rank: int, *, overtake: bool = False) -> None:
        """Wait for the turn of the rank, and put its state into the process."""
        while True:
            if self._holder is None:
                self._wanting.add(rank)
                self._hand_on(rank)
            if self._holder == rank:
                if self._has_process or self._closed:
                    break
                self._acquire_process()
                continue
            self._wanting.add(rank)
            turn = self._turn
            overtake = overtake or self._in_a_hurry
            woken = self._wakeups[rank].wait(OVERTAKE_S if overtake else None)
            if overtake and not woken and self._turn == turn and not self.clocks.num_held:
                self._overtake(rank)
        self._running, self._turn_since_ns = rank, self.clocks.read()
        self._overtaken.discard(rank)
        self._patience_s.pop(rank, None)
        self.clocks.start(rank, self._turn_since_ns)
        if not self._closed:
            self._owners[rank].load()
        if self.when_rank_runs is not None:
            self.when_rank_runs()

    def _take_next_turn(self, rank: int, *, overtake: bool = False) -> None:
        """Wait for the next turn of the rank, which must not go on with the state of the caller.

        Raises:
            StateError: the world was left while the rank had no turn.
        """
        self._take_turn(rank, overtake=overtake)
        if self._closed:
            raise StateError(f"rank {rank} does not go on, because its world was left meanwhile")

    def _overtake(self, rank: int | None = None) -> None:
        """Take the turn from its holder; see [Note: a rank that does not hand on]."""
        assert self._holder is not None
        self._overtaken.add(self._holder)
        if rank is None:
            self._hand_on(self._holder)
        else:
            self._turn += 1
            self._holder, self._running = rank, None
            self._wanting.discard(rank)

    def _acquire_process(self) -> None:
        """Wait until no other world that its starter has started runs a rank."""
        self.lock.release()
        try:
            self._starter.lock.acquire(self)
        finally:
            self.lock.acquire()
        self._has_process = True

    def _release_process(self) -> None:
        self._has_process = False
        self._starter.lock.release(self)

    def watch(self) -> None:
        """Let others run if the rank whose turn it is has blocked for ``BLOCKED_S``.

        Called now and then, without the lock.
        """
        with self.lock:
            now_ns, processor_ns = self.clocks.read(), time.process_time_ns()
            turn, seen_ns, seen_processor_ns = self._looked
            busy = processor_ns - seen_processor_ns > _BUSY * (now_ns - seen_ns)
            waited_for = self._wanting and self._holder is not None
            if turn != self._turn or busy or not waited_for or others_work():
                self._looked = (self._turn, now_ns, processor_ns)
            elif now_ns - seen_ns >= 1e9 * BLOCKED_S:
                self._overtake()
                self._looked = (self._turn, now_ns, processor_ns)

    def long_turn(self, seconds: float) -> tuple[int, list[int], float] | None:
        """The rank that has run for too long, those that wait for their turns, and their patience.

        Called now and then, without the lock.

        Args:
            seconds: the patience of ranks that are in no call.
        """
        with self.lock:
            patience = {rank: self._patience_s.get(rank, seconds) for rank in self._wanting}
            rank, ran_ns = self._running, self.clocks.read() - self._turn_since_ns
            shortest_s = min(patience.values(), default=math.inf)
            if rank is None or ran_ns < 1e9 * shortest_s:
                return None
            return rank, [r for r in sorted(patience) if patience[r] == shortest_s], shortest_s


def _after_fork() -> None:
    """A forked child is no simulated rank: its one thread runs alone, with the state it has."""
    here.rank = here.hand_on = None


at_fork(after_in_child=_after_fork)
