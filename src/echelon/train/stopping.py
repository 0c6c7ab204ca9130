"""Signals that end a job: all ranks stop after the same step.

Schedulers announce the end of a job by a signal, some seconds before they kill it. The signal may
reach only one rank, or each rank at another moment, so the ranks agree before they act on it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import ClassVar, Self, final

import torch

from echelon.checks import instance, integer, positive
from echelon.comm.group import Group
from echelon.errors import ArgumentError, StateError
from echelon.process.main_thread import in_main_thread
from echelon.process.operating_system import signals_named
from echelon.process.process_end import EXIT_RESUMABLE as EXIT_RESUMABLE

ECHO_S = 1.0  # for so long after a signal, a further one of the same kind counts as its echo

_DEFAULT = signals_named("SIGTERM", "SIGUSR1")
_CATCHABLE = set(map(int, signal.Signals)) - set(signals_named("SIGKILL", "SIGSTOP"))

_Handler = Callable[[int, FrameType | None], object] | int | None


class _Caught:
    """One kind of signal, which has one handler in this process for all its listeners.

    [Note: first and second signal] The first signal is a request to stop. A further one shortly
    after it is its echo: a scheduler may signal all processes of a job, and a launcher among them
    passes the signal on. A later one goes to the handler that was there before, so that an
    impatient user can still end the job. A forked child, such as a worker of a DataLoader, inherits
    the handler and survives the first signal too, except that torch ends these workers after a
    SIGTERM that is not from their parent.
    """

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.num_listeners = 0
        self.received_s: float | None = None  # time of the first signal
        self.installed = False
        self._previous: _Handler = signal.SIG_DFL

    def update(self) -> None:
        """Install the handler if there are listeners, else remove it; the main thread calls it."""
        current = signal.getsignal(self.number)
        if self.num_listeners and not self.installed:
            self._previous = current
            signal.signal(self.number, self._handle)
            self.installed = True
        elif not self.num_listeners and self.installed:
            if current == self._handle:  # a handler that was installed since then stays
                signal.signal(self.number, self._previous)
            self.installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.num_listeners and self.received_s is None:
            self.received_s = now
        elif self.num_listeners and self.received_s and now < self.received_s + ECHO_S:
            return
        elif callable(self._previous):
            self._previous(number, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_lock = threading.Lock()
_caught: dict[signal.Signals, _Caught] = {}


def _listen(number: signal.Signals) -> bool:
    """Begin to listen, and return whether this process has the handler."""
    with _lock:
        caught = _caught.setdefault(number, _Caught(number))
        if not caught.num_listeners:
            caught.received_s = None
        caught.num_listeners += 1
    in_main_thread(caught.update)
    return caught.installed


def _unlisten(number: signal.Signals) -> None:
    with _lock:
        caught = _caught[number]
        caught.num_listeners -= 1
    # If the main thread never removes the handler, it passes signals on, as it has no listeners.
    in_main_thread(caught.update, wait=False)


@final
class StopSignals:
    """Turns signals into a request to stop, which all ranks see at the same step.

    Law: ``requested()`` answers alike on all ranks, whichever rank a signal has reached.

    Save inside the block. If the ranks stop, they leave the block together, because a launcher ends
    the other ranks when the first has exited. A second signal of the same kind, more than a second
    later, has the effect that it had before the block; after the block all signals have.

    Python installs handlers in the main thread only. For simulated ranks the main thread does so
    while it waits in ``ec.run`` or ``echelon run``, so a signal to the process reaches all ranks. A
    rank on any other thread warns that it receives no signals; it still stops with the others.

    Args:
        group: the ranks that stop together: ``world.group``.
        signals: the signals to catch; by default SIGTERM and SIGUSR1, not SIGINT (Ctrl-C).
        every: the ranks agree in every so many calls. That is an all-reduce of two numbers, for
            which a GPU must finish its work.
        grace_s: seconds from the signal until the job is killed, for ``seconds_left``.

    Attributes:
        exit_code: 75, for ``sys.exit``: the job can be resumed. Also ``ec.EXIT_RESUMABLE``.

    Raises:
        ArgumentError: ``group`` is not a ``Group``, or a signal cannot be caught.

    Example:
        >>> def main(world):
        ...     with StopSignals(world.group) as stop:
        ...         for step in range(1_000_000):
        ...             if step == 3 and world.rank == 1:
        ...                 os.kill(os.getpid(), signal.SIGUSR1)
        ...             if stop.requested():
        ...                 break  # or: ec.save(...); sys.exit(stop.exit_code)
        ...     return stop.signal.name
        >>> from echelon.launch.run import run
        >>> run(main, ranks=2)
        ['SIGUSR1', 'SIGUSR1']
    """

    exit_code: ClassVar[int] = EXIT_RESUMABLE

    def __init__(
        self,
        group: Group,
        signals: Sequence[int] = _DEFAULT,
        *,
        every: int = 1,
        grace_s: float | None = None,
    ) -> None:
        instance("group", group, Group)
        self._group = group
        self._numbers = _numbers(signals)
        self._every = integer("every", every, low=1)
        self._grace_s = None if grace_s is None else positive("grace_s", grace_s)
        self._open = False
        self._num_calls = 0
        self._signal: signal.Signals | None = None
        self._deadline_s: float | None = None
        self._settled_s = 0.0  # time after which no rank should get the signal or its echo

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that all ranks follow; None before ``requested()`` has returned True."""
        return self._signal

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the job is killed, at least 0, counted from the first rank's signal.

        None without ``grace_s``, and before ``requested()`` has returned True.
        """
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def requested(self) -> bool:
        """Whether to stop now; all ranks call it after the same step.

        Raises:
            StateError: it is called outside of the ``with`` block.
        """
        if not self._open:
            raise StateError("requested() outside of `with ec.StopSignals(...) as stop`")
        self._num_calls += 1
        if self._signal is None and self._num_calls % self._every == 0:
            self._agree()
        return self._signal is not None

    def __enter__(self) -> Self:
        if self._open:
            raise StateError("these StopSignals listen already: make others for an inner block")
        for number in self._numbers:
            if signal.getsignal(number) is None:
                raise ArgumentError(
                    f"{number.name} has a handler that is not Python's, which could not be "
                    "restored: leave it out of signals"
                )
        self._open, self._num_calls, self._signal, self._deadline_s = True, 0, None, None
        heard = [_listen(number) for number in self._numbers]
        if not all(heard):
            warnings.warn(
                f"rank {self._group.rank} runs outside of the main thread, so it hears no signals; "
                "it stops if another rank is asked to",
                RuntimeWarning,
                stacklevel=2,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._open:
            raise StateError("these StopSignals do not listen: use them in a with statement")
        try:
            if self._signal is not None and (kind is None or issubclass(kind, SystemExit)):
                self._group.barrier(label="all ranks have stopped")
                # The signal, or its echo, may not have reached this rank yet.
                time.sleep(max(0.0, self._settled_s - time.monotonic()))
        finally:
            self._open = False
            for number in self._numbers:
                _unlisten(number)

    def _agree(self) -> None:
        """Agree with the other ranks on whether a signal has reached any of them."""
        number, since_us = 0, 0
        for caught in (_caught[number] for number in self._numbers):
            if caught.received_s is not None:
                number = max(number, caught.number)
                since_us = max(since_us, int((time.monotonic() - caught.received_s) * 1e6))
        facts = torch.tensor([number, since_us], dtype=torch.int64, device=self._group.device)
        self._group.all_reduce(facts, "max", label="whether to stop")
        number, since_us = facts.tolist()
        if number:
            self._signal = signal.Signals(number)
            sent_s = time.monotonic() - since_us / 1e6
            self._settled_s = sent_s + ECHO_S
            self._deadline_s = None if self._grace_s is None else sent_s + self._grace_s


def _numbers(signals: object) -> tuple[signal.Signals, ...]:
    """``signals`` without repetitions; a signal that cannot be caught is refused."""
    if not isinstance(signals, Sequence) or isinstance(signals, str) or not signals:
        raise ArgumentError(f"signals is {signals!r:.80}; give a list such as [signal.SIGTERM]")
    numbers = [integer(f"signals[{i}]", number) for i, number in enumerate(signals)]
    for number in numbers:
        if number not in _CATCHABLE:
            raise ArgumentError(f"signals has {number}, which is no signal that can be caught")
    return tuple(map(signal.Signals, dict.fromkeys(numbers)))
