"""Simulated ranks as threads: start them, follow them to their end, raise the first failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from types import TracebackType
from typing import Any, Self, final

import torch

from echelon.c10d.rank_limits import note_for
from echelon.c10d.rank_names import start_rank
from echelon.comm.threads.blocking_calls import join_in_turn
from echelon.comm.threads.debugger_watch import DebuggerWatch
from echelon.comm.threads.exit_handlers import guarded_exit
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.threads.rank_breakpoints import debugger_of_ranks
from echelon.comm.threads.running_time import running_s
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.comm.world import World
from echelon.diagnosis.stuck_ranks import StuckRankRule
from echelon.errors import CommTimeout
from echelon.launch.rank_function import call
from echelon.process import time_limits
from echelon.process.background_threads import run_in_background
from echelon.process.main_thread import serve, serving

POLL_S = 0.1  # how often the thread that waits for simulated ranks looks what they want

Enter = Callable[[World], None]


def _join(thread: threading.Thread, seconds: float) -> None:
    join_in_turn(thread, seconds)  # of the rank that this thread may be


@final
class SimulatedRanks:
    """The threads of a world, each of which calls a function once; a context manager.

    Args:
        fn: called with the ``World`` of the rank, and ``args``.
        thread_world: what the ranks share; they take turns.
        args: further arguments.
        device: where all ranks live.
        enter: called by each rank with its world before ``fn``.

    Attributes:
        fn: what ranks call that start from now on.
        results: what the ranks have returned, in rank order.
        threads: of the ranks that have started.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        thread_world: ThreadWorld,
        args: tuple[Any, ...],
        device: torch.device,
        enter: Enter,
    ) -> None:
        self.fn, self._world, self._args = fn, thread_world, args
        self._device, self._enter = device, enter
        self._turns = thread_world.order
        self.results: list[Any] = [None] * thread_world.size
        self.threads: list[threading.Thread] = []
        self._debuggers = DebuggerWatch()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(closing(self._turns))
        self._stack.enter_context(self._debuggers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()

    def follow(
        self,
        is_held: Callable[[], bool] = lambda: False,
        wait: Callable[[threading.Thread, float], None] = _join,
    ) -> None:
        """Start the ranks, if they have not been, and return when they have ended, or are held.

        Args:
            is_held: whether to return although ranks have not ended.
            wait: waits for the end of a thread, or for seconds; or less, if ranks are held.

        Raises:
            Exception: the first failure of a rank, with a note that names the rank.
        """
        world = self._world
        with guarded_exit(world.timeout), serving():
            try:
                for rank in range(len(self.threads), world.size):
                    # Within the try: one may run, and wait, before the last.
                    thread = run_in_background(f"rank {rank}", self._rank_main, rank)
                    self.threads.append(thread)
                self._await(is_held, wait)
            except BaseException as error:  # Ctrl-C: free the ranks before we leave
                world.fail(-1, error)
                if not isinstance(error, CommTimeout):  # which has waited for its rank in vain
                    self.left_behind()  # or what a rank still does would be done to the caller
                raise
            if world.failure is not None:
                self._raise_first()

    def left_behind(self) -> list[str]:
        """Wait until the ranks have ended or had their time; the names of those that still run."""
        deadline = running_s() + time_limits.NOTICE_IN_THREADS_S
        for thread in self.threads:
            while thread.is_alive() and running_s() < deadline:
                _join(thread, max(0.0, min(POLL_S, deadline - running_s())))
                serve()
        return [thread.name for thread in self.threads if thread.is_alive()]

    def _rank_main(self, rank: int) -> None:
        world = self._world
        try:
            # Backward runs on the rank's own thread, or hooks of several ranks would queue behind
            # one another.
            with (
                debugger_of_ranks.needed(),
                self._turns.of_rank(rank),
                torch.autograd.set_multithreading_enabled(False),
            ):
                world.enter(rank)
                group = ThreadGroup(world, rank, range(world.size), device=self._device)
                rank_world = World(
                    group,
                    backend="threads",
                    close=lambda error: _leave(world, rank, error),
                    steps=world.step_counter(rank),
                )
                self._enter(rank_world)
                start_rank(group)
                rank_world.hints["simulated ranks"] = note_for
                try:
                    self.results[rank] = call(self.fn, rank_world, self._args)
                    rank_world.close()
                except Exception as error:
                    rank_world.end_what_is_begun(error)
                    raise
                finally:
                    rank_world.steps.stop()
        except BaseException as error:
            world.fail(rank, error)

    def _await(
        self, is_held: Callable[[], bool], wait: Callable[[threading.Thread, float], None]
    ) -> None:
        """Return when all ranks have ended, one has failed, or they are held.

        Raises:
            CommTimeout: a rank does not follow those that have left, or keeps them from running.
        """
        world, threads = self._world, self.threads
        rule = StuckRankRule(world.timeout, running_s)
        while world.failure is None and not is_held():
            alive = [thread for thread in threads if thread.is_alive()]
            if not alive:
                return
            wait(alive[0], POLL_S)
            serve()
            self._debuggers.look()
            self._turns.watch()
            signs = {
                rank: world.exit_sign(rank, thread in alive) for rank, thread in enumerate(threads)
            }
            error: CommTimeout | None = None
            if late := rule.late(signs):
                error = world.stuck_rank_error(late)
            elif (turn := self._turns.long_turn(world.timeout)) is not None:
                error = world.long_turn_error(*turn)
            if error is not None:
                names = ", ".join(threads[rank].name for rank in error.missing)
                error.add_note(f"still running outside communication, and left behind: {names}")
                raise error

    def _raise_first(self) -> None:
        """Raise the first failure, once the other ranks have ended or had their time."""
        stuck = self.left_behind()
        assert self._world.failure is not None
        rank, error = self._world.failure
        error.add_note(f"raised on rank {rank} of {self._world.size}")
        if step := self._world.sightings[rank].step:
            error.add_note(f"rank {rank} was at step {step}")
        if stuck:
            names = ", ".join(stuck)
            error.add_note(f"still running outside communication, and left behind: {names}")
        raise error


def _leave(thread_world: ThreadWorld, rank: int, error: BaseException | None) -> None:
    """What a simulated rank does when it closes its world."""
    if error is None:
        thread_world.finish(rank)
    else:
        thread_world.fail(rank, error)
