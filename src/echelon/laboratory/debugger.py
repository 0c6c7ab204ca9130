"""The debugger that ``breakpoint()`` opens in a simulated rank: pdb, and the other ranks.

While it waits for a command no rank runs, and no limit of time. A step (``n``) over a call that
waits for other ranks lets these run until the call has returned.
"""

from __future__ import annotations

import pdb
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType, TracebackType
from typing import Any

from echelon.comm.threads.blocking_calls import keeping_turn
from echelon.comm.threads.group import ThreadGroup
from echelon.comm.threads.rank_states import rank_states
from echelon.comm.threads.running_time import stopped_time
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.comm.threads.turns import Turns
from echelon.comm.world import World
from echelon.laboratory.debugger_host import current_host
from echelon.laboratory.debugger_input import completing, read_line
from echelon.laboratory.rank_commands import RankCommands
from echelon.laboratory.rank_frames import RankView, place_of, stack_of_frame, stack_of_traceback
from echelon.laboratory.shared_breakpoints import SharedBreakpoints
from echelon.launch.run import entered
from echelon.process.this_rank import here


class RankDebugger(RankCommands, SharedBreakpoints, pdb.Pdb):
    """pdb in a simulated rank, or in another thread beside ranks.

    Args:
        world: of the rank; None for a thread that is no rank.

    Attributes:
        header: printed at the next stop, if there is one.
    """

    def __init__(self, world: World | None) -> None:
        super().__init__(nosigint=True)
        self.world = world
        self.header: str | None = None
        self._place = ""
        self.stopped_rank = None if world is None else world.rank
        self.shows(self.stopped_rank)

    @property
    def _thread_world(self) -> ThreadWorld | None:
        group = None if self.world is None else self.world.group
        return group.thread_world if isinstance(group, ThreadGroup) else None

    def let_others_come(self) -> None:
        """Let the other ranks run until each waits, or has come to a breakpoint of its own."""
        if self._thread_world is not None and self.stopped_rank is not None:
            self._thread_world.order.yield_turn(self.stopped_rank)

    def break_here(self, frame: FrameType) -> bool:
        """Whether a line has a breakpoint; if so, the others have come where they wait."""
        stops = super().break_here(frame)
        if stops:
            self.let_others_come()
        return stops

    def rank_views(self) -> list[RankView]:
        """All ranks; of this one, the frames that the debugger has stopped in."""
        if self._thread_world is None:
            return []
        return [
            RankView(state.rank, self.stopped_stack, "stopped here")
            if state.rank == self.stopped_rank
            else RankView(state.rank, stack_of_frame(state.frame), state.doing)
            for state in rank_states(self._thread_world)
        ]

    def interaction(self, frame: FrameType | None, *args: Any, **options: Any) -> None:
        """Stop all ranks, and obey commands until one lets this rank go on.

        Raises:
            DebuggerQuit: a command ends the run.
        """
        if self._is_over():
            self.set_continue()  # the rank hears of it at its next call
            return
        with self._stopped():
            self._place = place_of(
                stack_of_traceback(args[0]) if frame is None else stack_of_frame(frame)
            )
            if self.header is not None:
                self.message(self.header)
            self.header = None
            super().interaction(frame, *args, **options)
        if self.quitting:
            self._quit()

    @contextmanager
    def _stopped(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(stopped_time())
            stack.enter_context(keeping_turn())
            if self._thread_world is not None and self.stopped_rank is not None:
                stack.enter_context(_asking(self._thread_world.order, self.stopped_rank))
            host = current_host()
            host.enter(self)
            self.stdout = host.output()
            self.shows(self.stopped_rank)
            yield
            if self.stoplineno == -1:  # it goes on, and not step by step
                host.leave(self)
            if self._thread_world is not None and self.breaks:
                self._thread_world.order.when_rank_runs = _follow_breaks

    def _quit(self) -> None:
        error = current_host().quit_error(self.stopped_rank, self._place)
        if self._thread_world is not None and self.stopped_rank is not None:
            self._thread_world.fail(self.stopped_rank, error)  # also if the user catches it
        raise error from None

    def cmdloop(self, intro: Any = None) -> None:
        """Obey commands, each of which the main thread reads."""
        self.preloop()
        with completing(self.complete):
            stop = False
            while not stop:
                line = self.cmdqueue.pop(0) if self.cmdqueue else self._read()
                line = self.precmd(line)
                stop = self.postcmd(self.onecmd(line), line)
        self.postloop()

    def _read(self) -> str:
        try:
            return read_line(self.prompt, self.stdout, self._is_over)
        except EOFError:
            return "EOF"
        except KeyboardInterrupt:
            return "q"

    def _is_over(self) -> bool:
        """Whether the user has ended the run, here or in the debugger of another rank."""
        failure = None if self._thread_world is None else self._thread_world.failure
        return failure is not None and current_host().ends_run(failure[1])


@contextmanager
def _asking(order: Turns, rank: int) -> Iterator[None]:
    """Refuse calls of groups that a user types in the body, which the rank has its turn in."""
    with order.lock:
        order.resume(rank)
    order.asking_thread = threading.get_ident()
    try:
        yield
    finally:
        order.asking_thread = None


def _debugger_of(world: World | None) -> RankDebugger:
    """The debugger of the calling thread, which this world's rank runs on."""
    debugger: RankDebugger | None = here.debugger
    if debugger is None or debugger.world is not world:
        debugger = here.debugger = RankDebugger(world)
    return debugger


def _follow_breaks() -> None:
    """Let the rank that runs now on its thread stop at breakpoints of others."""
    world = entered()
    if world is not None:
        _debugger_of(world).follow_breaks(sys._getframe(1))


def stop(place: FrameType | TracebackType, header: str | None = None) -> None:
    """Open the debugger in a frame, at the next line that runs there, or where an error was."""
    debugger = _debugger_of(entered())
    debugger.header = header
    debugger.let_others_come()
    if isinstance(place, FrameType):
        debugger.set_trace(place)
        debugger.set_next(place)  # not in what still runs between this line and ours
        return
    if sys.gettrace() is None:
        debugger.reset()
    debugger.interaction(None, place)
    debugger.set_continue()  # nothing is left to step through
    debugger.follow_breaks(sys._getframe(1))
    current_host().leave(debugger)
