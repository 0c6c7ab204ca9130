"""Injected faults for tests of users: ranks that fail, lie, delay or exit at a chosen call.

A ``FaultyGroup`` replaces a group and misbehaves once, at its call number ``at``. ``FAULTS`` are
the faults that end in a named error, and ``run_faulty`` runs a rank function with one of them on
one rank::

    @pytest.mark.parametrize("fault", testing.FAULTS, ids=str)
    def test_my_training_never_hangs(fault):
        with pytest.raises(fault.ends_in):
            testing.run_faulty(train, ranks=2, fault=fault, rank=1, at=3, world="processes")

Law: in worlds of threads and of processes, every fault of ``FAULTS`` ends every rank with an error
that names what happened, at the latest after the timeout.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from echelon import checks
from echelon.comm.group import Group
from echelon.comm.primitives import Derived, Primitive
from echelon.comm.work import CompletedWork, Window, Work
from echelon.comm.world import World
from echelon.diagnosis import rank_time
from echelon.diagnosis.collective_call import CallSignature, CollectiveCall
from echelon.errors import (
    ArgumentError,
    CollectiveMismatch,
    CommError,
    CommTimeout,
    EchelonError,
    RankFailed,
)
from echelon.launch.run import run

run_ranks = run
"""``ec.run``, under the name that tests of many ranks use."""

_FOR_EVER_S = 1e6
_MESSAGES = ("send", "recv")

Issue = Callable[[CollectiveCall], Work | None]
Sleep = Callable[[float], object]


class InjectedFault(EchelonError):
    """The error of a rank whose fault is to raise one."""


@final
@dataclass(frozen=True, kw_only=True)
class Fault:
    """A way in which a rank misbehaves at one of its calls.

    Attributes:
        name: the name, as it appears in the name of a test.
        strike: a function that replaces the call; its arguments are the call, a function that
            issues it, and a function that sleeps.
        ends_in: the error that ``run`` raises; None: the fault is harmless.
        needs_process: whether it ends the whole process, so that simulated ranks cannot have it.
        needs_timeout: whether only the timeout ends the wait for this rank.
        at_messages: whether it can replace a send or a receive; if not, only collectives.
        again: whether it also replaces every later call.
    """

    name: str
    strike: Callable[[CollectiveCall, Issue, Sleep], Work | None]
    ends_in: type[Exception] | None = CommError
    needs_process: bool = False
    needs_timeout: bool = False
    at_messages: bool = True
    again: bool = False

    def __str__(self) -> str:
        return self.name


class _Left(BaseException):
    """Ends the function of a rank, which cannot catch it by ``except Exception``."""


def _raise(call: CollectiveCall, issue: Issue, sleep: Sleep) -> Work | None:
    raise InjectedFault(f"this rank was told to fail at {call}")


def _leave(call: CollectiveCall, issue: Issue, sleep: Sleep) -> Work | None:
    raise _Left


def _signal(name: str, call: CollectiveCall, issue: Issue, sleep: Sleep) -> Work | None:
    os.kill(os.getpid(), signal.Signals[name])
    return issue(call)


def _exit(call: CollectiveCall, issue: Issue, sleep: Sleep) -> Work | None:
    os._exit(0)


def _wait_first(seconds: float, call: CollectiveCall, issue: Issue, sleep: Sleep) -> Work | None:
    with rank_time.before_communication():
        sleep(seconds)
    if call.signature.op not in _MESSAGES:
        rank_time.arrive_late()
    return issue(call)


def _skip(call: CollectiveCall, issue: Issue, sleep: Sleep) -> Work | None:
    return CompletedWork(call)  # it was never issued


def _repeat(call: CollectiveCall, issue: Issue, sleep: Sleep) -> Work | None:
    work = issue(call)
    if work is not None:
        work.wait()
    return issue(call)


def _claim(
    alter: Callable[[CallSignature], CallSignature],
    call: CollectiveCall,
    issue: Issue,
    sleep: Sleep,
) -> Work | None:
    return issue(replace(call, signature=alter(call.signature)))


def _other_op(signature: CallSignature) -> CallSignature:
    return signature._replace(op="broadcast" if signature.op != "broadcast" else "all_reduce")


def _other_dtype(signature: CallSignature) -> CallSignature:
    return signature._replace(
        dtype=torch.int32 if signature.dtype != torch.int32 else torch.float32
    )


def _other_shape(signature: CallSignature) -> CallSignature:
    return signature._replace(shape=(*signature.shape, 2))


def _other_reduction(signature: CallSignature) -> CallSignature:
    return signature._replace(reduce="max" if signature.reduce != "max" else "min")


def _other_root(signature: CallSignature) -> CallSignature:
    return signature._replace(root=1 if signature.root != 1 else 0)


def _other_label(signature: CallSignature) -> CallSignature:
    return signature._replace(label=f"not {signature.label}")


def _liar(name: str, alter: Callable[[CallSignature], CallSignature]) -> Fault:
    strike = partial(_claim, alter)
    return Fault(name=name, strike=strike, ends_in=CollectiveMismatch, at_messages=False)


def slow(seconds: float) -> Fault:
    """A fault that delays every call from ``at`` on; it is harmless within the timeout.

    Example:
        >>> def main(world):
        ...     total = torch.tensor([world.rank])
        ...     world.group.all_reduce(total)
        ...     return total.item()
        >>> run_faulty(main, ranks=2, fault=slow(0.01), rank=1)
        [1, 1]
    """
    strike = partial(_wait_first, checks.number("seconds", seconds, 0.0))
    return Fault(name=f"dawdles {seconds} s", strike=strike, ends_in=None, again=True)


FAULTS: tuple[Fault, ...] = (
    Fault(name="raises", strike=_raise, ends_in=InjectedFault),
    Fault(name="returns early", strike=_leave),
    Fault(name="exits", strike=_exit, ends_in=RankFailed, needs_process=True),
    Fault(
        name="is killed",
        strike=partial(_signal, "SIGKILL"),
        ends_in=RankFailed,
        needs_process=True,
    ),
    Fault(
        name="crashes",
        strike=partial(_signal, "SIGSEGV"),
        ends_in=RankFailed,
        needs_process=True,
    ),
    Fault(
        name="is stopped",
        strike=partial(_signal, "SIGSTOP"),
        ends_in=CommTimeout,
        needs_process=True,
        needs_timeout=True,
    ),
    Fault(
        name="sleeps for ever",
        strike=partial(_wait_first, _FOR_EVER_S),
        ends_in=CommTimeout,
        needs_timeout=True,
    ),
    Fault(name="skips a call", strike=_skip, at_messages=False),
    Fault(name="repeats a call", strike=_repeat, at_messages=False),
    _liar("calls another operation", _other_op),
    _liar("has another dtype", _other_dtype),
    _liar("has another shape", _other_shape),
    _liar("has another reduction", _other_reduction),
    _liar("has another root", _other_root),
    _liar("has another label", _other_label),
)
"""Every way to fail that a test can inject."""


@final
class FaultyGroup(Group):
    """A group that forwards everything to ``inner`` and misbehaves at its call number ``at``.

    Some faults change what this rank tells the others about its call, not the data; on backends
    that do not compare calls they have no effect. A fault never affects the making of windows and
    subgroups; a subgroup has the same fault and counts its own calls. Use it in place of ``inner``
    from the start, never both.

    Args:
        inner: the group of a running world.
        fault: the fault.
        at: the first call that the fault may replace, counted from 0 over collectives and messages.
        sleep: the function by which the rank sleeps for some seconds.

    Example:
        >>> def main(world):
        ...     group = world.group
        ...     if world.rank == 1:
        ...         group = FaultyGroup(group, FAULTS[0])
        ...     group.barrier()
        >>> try:
        ...     run_ranks(main, ranks=2)
        ... except InjectedFault as fault:
        ...     print(fault)
        this rank was told to fail at barrier ...
    """

    def __init__(self, inner: Group, fault: Fault, at: int = 0, sleep: Sleep = time.sleep) -> None:
        checks.instance("inner", inner, Group)
        checks.instance("fault", fault, Fault)
        checks.integer("at", at)
        checks.function("sleep", sleep, "seconds")
        super().__init__(
            inner.name,
            inner.rank,
            inner.ranks,
            inner.device,
            inner.timeout,
            shares_memory=inner.shares_memory,
            note=inner._note,
        )
        self.overrides, self.has_tags = inner.overrides, inner.has_tags
        self._num_subgroups = inner._num_subgroups
        self._inner, self._fault, self._at, self._sleep = inner, fault, at, sleep
        self._num_calls = 0
        self._num_struck = 0

    def _use_timeout(self, seconds: float) -> None:
        self._inner.timeout = seconds

    def _start(self, call: CollectiveCall, operation: Primitive | Derived) -> Work | None:
        """Issue the call, or let the fault replace it."""

        def issue(call: CollectiveCall) -> Work | None:
            return self._inner._start(self._renumbered(call), operation)

        number, self._num_calls = self._num_calls, self._num_calls + 1
        fault = self._fault
        is_due = number >= self._at and (fault.again or not self._num_struck)
        if not is_due or (call.signature.op in _MESSAGES and not fault.at_messages):
            return issue(call)
        self._num_struck += 1
        return fault.strike(call, issue, self._sleep)

    def _renumbered(self, call: CollectiveCall) -> CollectiveCall:
        """The call with the number that ``inner`` gives it, which differs after a skipped call."""
        inner = self._inner
        if call.signature.op in _MESSAGES:
            position, inner._p2p_position = inner._p2p_position, inner._p2p_position + 1
        else:
            position, inner._position = inner._position, inner._position + 1
        return replace(call, position=position)

    def _subgroup(
        self, call: CollectiveCall, name: str, members: Sequence[int], device: torch.device | None
    ) -> FaultyGroup | None:
        self._inner._num_subgroups = self._num_subgroups
        subgroup = self._inner._subgroup(self._renumbered(call), name, members, device)
        if subgroup is None:
            return None
        return FaultyGroup(subgroup, self._fault, self._at, self._sleep)

    def _window(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Window:
        return self._inner._window(self._renumbered(call), numel, dtype)

    def _shared(self, call: CollectiveCall, numel: int, dtype: torch.dtype) -> Tensor:
        return self._inner._shared(self._renumbered(call), numel, dtype)


@dataclass(frozen=True)
class _FaultyRank:
    """A rank function with a fault on one rank; it is pickled for other processes."""

    fn: Callable[..., Any]
    fault: Fault
    rank: int
    at: int
    sleep: Sleep

    def __call__(self, world: World, *args: Any) -> Any:
        if world.rank != self.rank:
            return self.fn(world, *args)
        group = FaultyGroup(world.group, self.fault, self.at, self.sleep)
        faulty_world = World(group, backend=world.backend, close=world.close, steps=world.steps)
        try:
            return self.fn(faulty_world, *args)
        except _Left:
            return None


def run_faulty(
    fn: Callable[..., Any],
    ranks: int,
    fault: Fault,
    *,
    rank: int,
    at: int = 0,
    world: str = "threads",
    args: Sequence[Any] = (),
    timeout: float = 5.0,
) -> list[Any]:
    """Run ``fn`` as ``run(fn, ranks, world)`` does, with ``fault`` at a call of one rank.

    Args:
        rank: the rank that misbehaves.
        at: its first call that the fault may replace, counted from 0 over collectives and messages.
        timeout: seconds that a rank waits for others in one call.

    Raises:
        ArgumentError: the fault would end this process, because ranks are threads; or an argument
            is not what it must be.
        Exception: ``fault.ends_in``, unless ``fn`` makes fewer calls or the fault is harmless.
    """
    checks.function("fn", fn, "a world")
    checks.rank("rank", rank, checks.integer("ranks", ranks, 1))
    checks.instance("fault", fault, Fault)
    checks.integer("at", at)
    if fault.needs_process and world == "threads":
        raise ArgumentError(
            f"a rank that {fault} would end this process: use world='processes' for it"
        )
    # A simulated rank that sleeps would outlive its world, so it is woken when the world has ended.
    ended = threading.Event()
    sleep = ended.wait if world == "threads" else time.sleep
    try:
        faulty = _FaultyRank(fn, fault, rank, at, sleep)
        return run(faulty, ranks, world, args=args, timeout=timeout)
    finally:
        ended.set()
