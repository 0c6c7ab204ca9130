"""What happened, with names and numbers: everyone may emit, nobody needs to listen.

Emitting costs one attribute read when nobody listens. Observers subscribe with ``listen``; the
code that emits never learns who they are.

Events of this library and their facts (bytes in ``nbytes``, ranks inside the job in ``rank``):

====================  ==========================================================================
``collective.issue``  ``rank group op position nbytes label``: a collective was issued, a message
                      sent (op ``send``) or asked for (``recv``)
``collective.wait``   the same and ``seconds``: how long a rank was held up until it was complete
``memory``            ``rank category nbytes``: bytes of a category grew (or shrank, if negative)
``ddp.backward``      ``rank phase``: ``begin`` or ``end`` of a backward that reduces
``ddp.bucket``        ``rank bucket nbytes``: a bucket's gradients are complete and on their way
``fsdp.gather``       ``rank unit nbytes``: the parameters of a unit became whole
``fsdp.prefetch``     the same: a unit that is not needed yet began to become whole
``fsdp.release``      the same: they are this rank's parts again
``pipeline.action``   ``rank action kind training waited_s``: one action of a schedule ran, such as
                      ``2F0``; ``waited_s`` of its time passed until its input was there
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
    """One thing that happened.

    Attributes:
        name: what kind of thing, from the table of this module.
        start_s: when it began, on ``time.perf_counter``'s clock.
        seconds: how long it took; 0 for a moment.
        facts: its names and numbers.
    """

    name: str
    start_s: float
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class PeakBytes:
    """Live and peak bytes of one category, such as ``memory`` events tell.

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

_lock = threading.Lock()
_listeners: tuple[Listener, ...] = ()  # replaced as a whole, so that emit needs no lock


def listening() -> bool:
    """Whether anyone listens; lets a hot path skip the gathering of facts."""
    return bool(_listeners)


def emit(name: str, /, start_s: float | None = None, seconds: float = 0.0, **facts: Any) -> None:
    """Tell all listeners that something happened.

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

    It is called on the thread that emits; a listener shared by simulated ranks must be thread-safe.
    """
    global _listeners
    with _lock:
        _listeners = (*_listeners, listener)
    try:
        yield
    finally:
        with _lock:
            kept = list(_listeners)
            kept.remove(listener)
            _listeners = tuple(kept)
