"""Waits of Python for something else than a group, in which a rank hands on after a while.

A simulated rank may wait for a thread of its own, which may wait for other ranks, and these for
their turns. So while ranks take turns, ``Condition.wait`` (with all that is built on it: events,
queues, futures), ``Thread.join``, ``time.sleep`` and the waits of ``selectors`` (with which
multiprocessing and a ``DataLoader`` wait for processes) let other ranks run once they have taken
``GRACE_S``, together since the rank last waited for others. Most waits are shorter, and change
nothing in the order of turns. A rank that waits inside of ``torch.compile``, as for a C++ compiler,
keeps its turn.
"""

from __future__ import annotations

import selectors
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from operator import is_
from typing import Any

from echelon.comm.threads.debugger_watch import is_in_debugpy
from echelon.diagnosis import stacks
from echelon.process.replacement import Installation, Replacement
from echelon.process.this_rank import here

# Longer than the main thread needs to look what ranks want of it.
GRACE_S = 0.2

HandOn = Callable[[], AbstractContextManager[None]]  # other ranks run in its body

_condition_wait = threading.Condition.wait
_thread_join = join_in_turn = threading.Thread.join  # ``join_in_turn`` never hands on
_sleep = time.sleep
_Selector: Any = vars(selectors)["_PollLikeSelector"]
_select = _Selector.select


def renew_grace() -> None:
    """Let the calling thread wait for ``GRACE_S`` again before it hands on."""
    here.grace_s = GRACE_S


def _hand_on() -> HandOn | None:
    hand_on = here.hand_on
    # debugpy stops a rank by a wait, wherever it is; that rank keeps its turn.
    return None if hand_on is None or is_in_debugpy() or _compiles() else hand_on


def _compiles() -> bool:
    """Whether this thread has the lock of ``torch.compile``, for which others block in C code."""
    lock: Any = getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)
    return lock is not None and bool(lock._is_owned())


def _in_grace(wait: Callable[[float], bool], timeout: float | None) -> tuple[bool, float]:
    """Wait while the rank keeps its turn; short waits in a loop add up.

    Returns:
        what ``wait`` has returned, and the seconds that it was given.
    """
    grace_s = here.grace_s
    seconds = grace_s if timeout is None else max(0.0, min(grace_s, timeout))
    start_s = time.monotonic()
    arrived = wait(seconds)
    here.grace_s = max(0.0, grace_s - (time.monotonic() - start_s))
    return arrived, seconds


def _wait(self: threading.Condition, timeout: float | None = None) -> bool:
    hand_on = _hand_on()
    if hand_on is None:
        return _condition_wait(self, timeout)
    condition: Any = self
    if not condition._is_owned():
        raise RuntimeError("cannot wait on un-acquired lock")
    # One waiter for the time before and after handing on. Two calls of Condition.wait would lose
    # a notification that comes when the first has given up and does not have the lock again yet.
    notified = threading.Lock()
    notified.acquire()
    condition._waiters.append(notified)
    arrived, held = False, condition._release_save()
    try:
        arrived, grace_s = _in_grace(lambda seconds: notified.acquire(timeout=seconds), timeout)
        if not arrived and (timeout is None or timeout > grace_s):
            with hand_on():
                arrived = notified.acquire(timeout=-1 if timeout is None else timeout - grace_s)
        return arrived
    finally:
        condition._acquire_restore(held)
        if not arrived and notified in condition._waiters:
            condition._waiters.remove(notified)


def _ends(thread: threading.Thread, seconds: float) -> bool:
    _thread_join(thread, seconds)
    return not thread.is_alive()


def _join(self: threading.Thread, timeout: float | None = None) -> None:
    hand_on = _hand_on()
    if hand_on is None:
        _thread_join(self, timeout)
        return
    ended, grace_s = _in_grace(lambda seconds: _ends(self, seconds), timeout)
    if not ended and (timeout is None or timeout > grace_s):
        with hand_on():
            _thread_join(self, None if timeout is None else timeout - grace_s)


def _sleep_in_turn(seconds: float, /) -> None:
    hand_on = _hand_on()
    if hand_on is None or not isinstance(seconds, int | float) or not seconds > 0:
        _sleep(seconds)
        return
    _, grace_s = _in_grace(lambda seconds: bool(_sleep(seconds)), seconds)
    if seconds > grace_s:
        with hand_on():
            _sleep(seconds - grace_s)


def _select_in_turn(self: Any, timeout: float | None = None) -> list[Any]:
    hand_on = _hand_on()
    if hand_on is None or (timeout is not None and timeout <= 0):
        return list(_select(self, timeout))
    ready: list[Any] = []
    grace_s = _in_grace(lambda seconds: not _find(ready, self, seconds), timeout)[1]
    if not ready and (timeout is None or timeout > grace_s):
        with hand_on():
            _find(ready, self, None if timeout is None else timeout - grace_s)
    return ready


def _find(ready: list[Any], selector: Any, timeout: float | None) -> bool:
    """Add what is ready, after a wait for it; whether there is nothing."""
    ready += _select(selector, timeout)
    return not ready


_REPLACEMENTS: tuple[tuple[Any, str, Any, Any], ...] = (
    (threading.Condition, "wait", _condition_wait, _wait),
    (threading.Thread, "join", _thread_join, _join),
    (time, "sleep", _sleep, _sleep_in_turn),
    (_Selector, "select", _select, _select_in_turn),
)


for *_, _replacement in _REPLACEMENTS:
    stacks.hide(_replacement)


# They do not call what somebody else has put there, so they leave that alone.
_in_python = Installation.of(
    *(
        Replacement(holder, name, new, over=partial(is_, original))
        for holder, name, original, new in _REPLACEMENTS
    )
)


@contextmanager
def handing_on(hand_on: HandOn) -> Iterator[None]:
    """In the body, long waits of this thread let other ranks run.

    Example:
        >>> from contextlib import contextmanager
        >>> @contextmanager
        ... def hand_on():
        ...     print("others run")
        ...     yield
        >>> with handing_on(hand_on):
        ...     time.sleep(GRACE_S + 0.01)
        others run
    """
    before = here.hand_on
    with _in_python.needed():
        here.hand_on = hand_on
        renew_grace()
        try:
            yield
        finally:
            here.hand_on = before


@contextmanager
def keeping_turn() -> Iterator[None]:
    """In the body, no wait of this thread lets other ranks run."""
    before = here.hand_on
    here.hand_on = None
    try:
        yield
    finally:
        here.hand_on = before
