"""A device whose streams are late at random, and from whose code one wait can be taken away.

It stands in ``echelon.comm.streams.kinds``, so the code under test is what users run. A *site* is a
place that uses a stream: the method of the stream, and the function that calls it. Without its site
a wait is not made, and what would run on a side stream runs on the current one.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, final

import torch
from gpu_device import has_streams
from gpu_network import cycles_per_ms
from torch.utils._python_dispatch import _disable_current_modes

from echelon.comm import streams

__all__ = ["Disturbance", "disturbed"]

LONGEST_MS = 1.0  # far more than any kernel of the small models here
POISON = 0xFF  # as bytes of a floating-point number: NaN

Kind = Callable[[torch.device], streams.DeviceKind]


@final
class Disturbance:
    """What is done to the streams of one run.

    Args:
        seed: of the delays; None: there are none, and the device is synchronized at each site, so
            that all work has one order.
        without: the site that is taken away.

    Attributes:
        sites: how often each was reached.
    """

    def __init__(
        self, device: torch.device, seed: int | None = None, without: str | None = None
    ) -> None:
        self.device, self.without = device, without
        self.sites: Counter[str] = Counter()
        self._delays = None if seed is None else random.Random(seed)
        self._owners: dict[int, torch.cuda.Stream] = {}  # by storage, whose pool it is from

    def delay(self) -> None:
        """Have the current stream sleep for a while."""
        if not has_streams(self.device):
            return
        if self._delays is None:
            torch.cuda.synchronize(self.device)
        elif self._delays.random() < 0.7:
            milliseconds = self._delays.random() * LONGEST_MS
            torch.cuda._sleep(int(1 + milliseconds * cycles_per_ms(self.device)))

    def allows(self, method: str) -> bool:
        """Note a site, two calls further out; whether it is there."""
        code = sys._getframe(2).f_code
        site = f"{Path(code.co_filename).stem}.{code.co_qualname}: {method}"
        self.sites[site] += 1
        return site != self.without

    def has_engine_wait(self) -> bool:
        """The same for the wait of a collective."""
        site = "NativeWork: wait"
        self.sites[site] += 1
        return site != self.without

    def resize(self, memory: torch.UntypedStorage, nbytes: int) -> None:
        """Fill memory that is freed with NaN, on the stream from whose pool it is."""
        if not has_streams(self.device):
            return
        if nbytes:
            self._owners[memory._cdata] = torch.cuda.current_stream(self.device)
        elif memory.nbytes() and self._delays is not None:
            owner = self._owners.get(memory._cdata)
            if owner is not None:
                # Echelon's own watch of writes in a forward is a mode, and this is no write of it.
                with torch.cuda.stream(owner), _disable_current_modes():
                    torch.empty(0, dtype=torch.uint8, device=self.device).set_(memory).fill_(POISON)


@final
class LateEvent(streams.StreamEvent):
    """An event behind which the current stream is late."""

    def __init__(self, event: streams.StreamEvent, disturbance: Disturbance) -> None:
        self._event, self._disturbance = event, disturbance

    def wait(self) -> None:
        if self._disturbance.allows("wait"):
            self._event.wait()
        self._disturbance.delay()

    def synchronize(self) -> None:
        if self._disturbance.allows("synchronize"):
            self._event.synchronize()

    def query(self) -> bool:
        return self._event.query()


@final
class LateStream(streams.Stream):
    """A stream that is late whenever something is issued on it."""

    def __init__(self, stream: streams.Stream, disturbance: Disturbance) -> None:
        self._stream, self._disturbance = stream, disturbance
        self.queued = stream.queued

    @contextmanager
    def _late(self) -> Iterator[None]:
        with self._stream.as_current():
            self._disturbance.delay()
            yield

    def as_current(self) -> AbstractContextManager[object]:
        return self._late() if self._disturbance.allows("as_current") else nullcontext()

    def wait_for_current(self) -> None:
        self._disturbance.delay()
        if self._disturbance.allows("wait_for_current"):
            self._stream.wait_for_current()

    def record_event(self) -> streams.StreamEvent:
        return LateEvent(self._stream.record_event(), self._disturbance)


def _kind_of(base: Any, disturbance: Disturbance) -> Kind:
    """A kind of device like ``base`` with late streams."""

    class LateDevice(base):  # type: ignore[misc]
        def side_stream(self) -> streams.Stream:
            return LateStream(super().side_stream(), disturbance)

        def current_stream(self) -> streams.Stream:
            return LateStream(super().current_stream(), disturbance)

        def resize(self, memory: torch.UntypedStorage, nbytes: int) -> None:
            disturbance.resize(memory, nbytes)
            super().resize(memory, nbytes)

    return LateDevice


@contextmanager
def disturbed(disturbance: Disturbance, base: Any = None) -> Iterator[None]:
    """Have models that are made in the body use late streams."""
    kind = disturbance.device.type
    before = streams.kinds.get(kind)
    streams.kinds[kind] = _kind_of(base or before or streams.PlainDevice, disturbance)
    try:
        yield
    finally:
        if before is None:
            del streams.kinds[kind]
        else:
            streams.kinds[kind] = before
