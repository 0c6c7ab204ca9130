"""Events: things that happened, with names and numbers, which any code may emit or listen to.

Emitting costs one attribute read if there are no listeners. Listeners subscribe with ``listen``;
the code that emits does not know them.

These are the events of this library and their facts (``nbytes`` in bytes, ``rank`` in the job):

====================  ==========================================================================
``collective.issue``  ``rank group op position nbytes label``: a collective was issued, or a
                      message was sent (op ``send``) or requested (``recv``)
``collective.wait``   the same and ``seconds``: how long a rank waited until it was complete
``memory``            ``rank category nbytes``: bytes of a category grew (or shrank, if negative)
``ddp.backward``      ``rank phase``: ``begin`` or ``end`` of a backward that reduces
``ddp.bucket``        ``rank bucket nbytes``: a bucket is complete, and its reduction starts
``fsdp.gather``       ``rank unit nbytes``: the parameters of a unit were unsharded
``fsdp.prefetch``     the same: the unshard of a unit that is not needed yet has begun
``fsdp.release``      the same: the parameters were resharded
``pipeline.action``   ``rank action kind training waited_s``: one action of a schedule ran, such as
                      ``2F0``; it waited ``waited_s`` of its time for its input
``checkpoint.save``   ``rank step nbytes``: this rank wrote its part of a step, which is committed
``checkpoint.load``   ``rank step nbytes``: this rank read its part of a step
====================  ==========================================================================
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Event", "Listener", "emit", "listen", "listening", "span"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        name: the kind of the event, from the table of this module.
        start_s: when it began, on the clock of ``time.perf_counter``.
        seconds: how long it took; 0 for a moment.
        facts: its names and numbers.
    """

    name: str
    start_s: float
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class PeakBytes:
    """The live and the peak bytes of a category of ``memory`` events.

    Example:
        >>> counter = PeakBytes()
        >>> for nbytes in (400, 200, -400):
        ...     counter.add(nbytes)
        >>> counter
        PeakBytes(live=200, peak=600)
    """

    live: int = 0
    peak: int = 0

    def add(self, nbytes: int) -> None:
        """Add ``nbytes``, which is negative when memory is given back."""
        self.live += nbytes
        if self.live > self.peak:
            self.peak = self.live


Listener = Callable[[Event], None]
"""What ``listen`` takes: it is called with each event, on the thread that emits it."""

_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()  # replaced as a whole, so that emit needs no lock


def listening() -> bool:
    """Whether there are listeners; if not, a hot path need not collect facts."""
    return bool(_listeners)


def emit(name: str, /, start_s: float | None = None, seconds: float = 0.0, **facts: Any) -> None:
    """Emit an event to all listeners.

    Example:
        >>> seen = []
        >>> with listen(seen.append):
        ...     emit("memory", rank=0, category="gradients", nbytes=400)
        >>> seen[0].facts["nbytes"]
        400
    """
    listeners = _listeners
    if not listeners:
        return
    event = Event(name, time.perf_counter() if start_s is None else start_s, seconds, facts)
    for listener in listeners:
        listener(event)


@contextmanager
def span(name: str, /, **facts: Any) -> Iterator[None]:
    """Emit one event for the body, with its duration; also when the body raises."""
    if not _listeners:
        yield
        return
    start_s = time.perf_counter()
    try:
        yield
    finally:
        emit(name, start_s, time.perf_counter() - start_s, **facts)


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call ``listener`` with every event of this process while the body runs.

    It is called on the thread that emits. A listener that simulated ranks share must be
    thread-safe.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _lock:
            listeners = list(_listeners)
            listeners.remove(listener)
            _listeners = tuple(listeners)
