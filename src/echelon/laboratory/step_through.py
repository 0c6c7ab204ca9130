"""``ec.step_through``: run a function on simulated ranks, one collective at a time."""

from __future__ import annotations

import atexit
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, final

import torch

from echelon.checks import integer, positive
from echelon.comm.threads.thread_world import ThreadWorld
from echelon.comm.world import DEFAULT_TIMEOUT_S
from echelon.errors import ArgumentError, StateError
from echelon.laboratory.step_commands import StepCommands
from echelon.laboratory.step_gate import StepGate
from echelon.laboratory.stepped_call import SteppedCall
from echelon.launch.cell_output import shown_in_cell
from echelon.launch.program import MOST_RANKS
from echelon.launch.rank_function import WithoutWorld, taking_world
from echelon.launch.run import enter, rank_rules, usable_device
from echelon.launch.simulated_ranks import SimulatedRanks
from echelon.page import View, ViewPart, html_of, view_of


def step_through(
    fn: Callable[..., Any],
    ranks: int,
    *,
    args: Sequence[Any] = (),
    timeout: float = DEFAULT_TIMEOUT_S,
    device: str | torch.device = "cpu",
    keep: int = 4096,
    rules: str | None = None,
) -> SteppedRun:
    """Run ``fn(world, *args)`` on simulated ranks, which are held after each call of a group.

    Nothing runs until the first step is asked for. While ranks are held no clock of theirs runs,
    and the process has the caller's random streams and other state.

    Args:
        fn: as of ``ec.run``; it may use ``torch.distributed``.
        ranks: how many.
        args: further arguments of ``fn``.
        timeout: seconds that a rank waits for others in one call before it raises.
        device: where all ranks live.
        rules: as of ``ec.run``.
        keep: the number of elements up to which the values of a rank are copied whole. Of a larger
            tensor a few numbers, its norm, and a checksum for each of 256 blocks are kept.

    Returns:
        an iterator over the calls.

    Raises:
        ArgumentError: an argument makes no sense.

    Example:
        >>> def main(world):
        ...     total = torch.tensor([world.rank, 1])
        ...     world.group.all_reduce(total)
        >>> for call in step_through(main, 2):
        ...     print(call.op, call.before[1].values, call.after[1].values, call.received(1))
        all_reduce tensor([1, 1]) tensor([1, 2]) 16
    """
    if not callable(fn):
        raise ArgumentError(f"fn is {fn!r:.80}; give a function that takes a World")
    if not isinstance(args, list | tuple):
        raise ArgumentError(f"args is {args!r:.80}; give a tuple of what fn takes after the world")
    ranks = integer("ranks", ranks, low=1, high=MOST_RANKS)
    timeout = positive("timeout", timeout, threading.TIMEOUT_MAX)
    keep = integer("keep", keep, low=0)
    world = ThreadWorld(ranks, timeout, rank_rules(rules, ranks))
    gate = StepGate(world, keep)
    world.watch = gate
    fn = taking_world(fn, len(args))
    return SteppedRun(SimulatedRanks(fn, world, tuple(args), usable_device(device), enter), gate)


@final
class SteppedRun(Iterator[SteppedCall]):
    """Simulated ranks that are held after each call; made by ``ec.step_through``.

    ``for call in steps`` ends the ranks when it is left early, unless it stands within ``with
    steps``, which ends them at its own end. ``next(steps)`` goes on by one call.

    Attributes:
        last: the call at which the ranks are held, or were last.
    """

    _repr_html_ = html_of

    def __init__(self, simulated: SimulatedRanks, gate: StepGate) -> None:
        self._simulated, self._gate = simulated, gate
        self._fn = simulated.fn
        self._has_begun, self._is_entered = False, False
        self._results: list[Any] | None = None
        self.last: SteppedCall | None = None
        # Ranks that are held keep neither the program nor this object from its end.
        self._end = weakref.finalize(self, _end_ranks, simulated, gate)

    def __next__(self) -> SteppedCall:
        """Let the ranks go on to the next call.

        Raises:
            StopIteration: all ranks have returned.
            Exception: the failure of a rank, with a note that names the rank; a deadlock; or a
                call in which ranks disagree.
        """
        call = self._step()
        if call is None:
            raise StopIteration
        return call

    def __iter__(self) -> Iterator[SteppedCall]:
        try:
            yield from self._calls()
        finally:
            if not self._is_entered:
                self.close()

    def _calls(self) -> Iterator[SteppedCall]:
        while (call := self._step()) is not None:
            yield call

    def _step(self) -> SteppedCall | None:
        """The next call; None if there is none."""
        if self._end.alive:
            self._go_on()
        if self._gate.call is not None:
            self.last = self._gate.call
        return self._gate.call

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def run(self) -> list[Any]:
        """Let the ranks run to their end; what they return, in rank order.

        Raises:
            Exception: the failure of a rank.
            StateError: the ranks have been ended before their time.
        """
        if self._end.alive:
            self._gate.open()
            self._go_on()
        return self.results

    def interact(self) -> list[Any] | None:
        """Show one call after the other on the terminal, and ask after each what comes next.

        Enter goes on to the next call, ``c`` to the end, ``q`` ends the ranks, ``?`` shows more.

        Returns:
            what the ranks return, in rank order; None after ``q``.
        """
        commands = StepCommands()
        try:
            for call in self._calls():
                if commands.stops_at(call):
                    holds = commands.asks(call)
                    if holds is None:
                        return None
                    if not holds:
                        return self.run()
            return self.results
        finally:
            self.close()

    @property
    def results(self) -> list[Any]:
        """What the ranks have returned, in rank order.

        Raises:
            StateError: they have not ended, or have failed or been ended before.
        """
        if self._results is None and self._end.alive:
            raise StateError("the ranks have not returned: go on with next(steps) or steps.run()")
        if self._results is None:
            raise StateError("the ranks were ended before they had returned")
        return self._results

    def __repr__(self) -> str:
        num_ranks = len(self._simulated.results)
        return f"<SteppedRun of {self._name()} on {num_ranks} ranks, {self._state()}>"

    def _name(self) -> str:
        fn = self._fn.fn if isinstance(self._fn, WithoutWorld) else self._fn
        return getattr(fn, "__qualname__", repr(fn))

    def _state(self) -> str:
        """Where the ranks are."""
        if self._results is not None:
            return "which have returned"
        if not self._end.alive:
            return "which were ended"
        return "not started" if self.last is None else f"held after call {self.last.number}"

    def close(self) -> None:
        """End the ranks where they are."""
        self._end()

    def _go_on(self) -> None:
        simulated, gate = self._simulated, self._gate
        try:
            with shown_in_cell(self._fn, len(simulated.results), "threads") as rank_fn:
                if not self._has_begun:
                    self._has_begun, simulated.fn = True, rank_fn
                    atexit.register(gate.end_at_exit)
                    simulated.__enter__()
                gate.let_on()
                simulated.follow(lambda: gate.call is not None, lambda _, s: gate.wait(s))
        except BaseException:
            self.close()
            raise
        if gate.call is None:
            self._results = list(simulated.results)
            self.close()


def _end_ranks(simulated: SimulatedRanks, gate: StepGate) -> None:
    """End ranks that are held, or that others have left behind; or that have never run."""
    if any(thread.is_alive() for thread in simulated.threads):
        gate.end(StateError("the ranks were ended between two calls"))
        if names := simulated.left_behind():
            warnings.warn(
                f"still running outside communication, and left behind: {', '.join(names)}",
                RuntimeWarning,
                stacklevel=2,
            )
    simulated.__exit__(None, None, None)
    atexit.unregister(gate.end_at_exit)


@view_of.register
def _(shown: SteppedRun) -> View:
    title = f"{shown._name()} on {len(shown._simulated.results)} simulated ranks, {shown._state()}"
    if shown.last is None:
        about = "Go on with next(steps), or for call in steps."
        return View(title=title, parts=[ViewPart(title="No call yet", content=about)])
    call = view_of(shown.last)
    return View(title=title, facts=call.facts, parts=[replace(call.parts[0], title=call.title)])
