"""One interface to the streams, memory and generators of CPU and CUDA devices.

No other file asks for ``device.type``. On the CPU every operation is complete when it returns, so
streams and events do nothing there.

[Note: streams]
A side stream makes progress beside the current stream. ``Stream.wait_for_current`` orders it after
the current stream, and ``StreamEvent.wait`` orders the current stream after an event of it. Neither
blocks the host, and neither does a collective that is waited for on the stream. Memory that was
allocated on a stream returns to the pool of this stream when it is freed. If another stream has
used it, call ``wait_for_current`` first.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import final

import torch
from torch import Tensor

_seeding = threading.Lock()


def local_device(local_rank: int) -> torch.device:
    """The CUDA device of this process, if there are any, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def is_cpu(device: torch.device) -> bool:
    """Whether ``device`` is the CPU, whose memory processes of one host can share."""
    return device.type == "cpu"


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for ``device``."""
    return torch.is_autocast_enabled(device.type)


def adds_in_order(device: torch.device) -> bool:
    """Whether ``index_add_`` on ``device`` adds repeated rows in a fixed order."""
    return device.type == "cpu"


def reading_waits(device: torch.device) -> bool:
    """Whether reading a value on ``device`` makes the host wait for queued work."""
    return not is_cpu(device)


def synchronize(device: torch.device) -> None:
    """Return when all work that is queued on ``device`` is done; at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_peak(device: torch.device) -> int:
    """The peak memory of this process in bytes: allocated on CUDA, resident on the CPU.

    On the CPU of Windows, which Python cannot ask, it is 0.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def device_name(device: torch.device) -> str:
    """The product that a CUDA device is; of others what torch calls them."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that ``device`` can copy from and to asynchronously. 1D.

    On CUDA it is pinned memory of torch's pool, which is reused only when the copies are done.
    """
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


class StreamEvent(ABC):
    """A point in the order of a stream, like ``torch.cuda.Event``."""

    @abstractmethod
    def wait(self) -> None:
        """Order the following work of the current stream after the event."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until everything before the event is done."""

    @abstractmethod
    def query(self) -> bool:
        """Whether everything before the event is done."""


class Stream(ABC):
    """A stream, like ``torch.cuda.Stream``. See [Note: streams].

    Attributes:
        queued: whether waiting for a collective on the stream does not block the host.
    """

    queued: bool

    @abstractmethod
    def as_current(self) -> AbstractContextManager[object]:
        """Make the stream current in the body."""

    @abstractmethod
    def wait_for_current(self) -> None:
        """Order the following work of the stream after the work of the current stream."""

    @abstractmethod
    def record_event(self) -> StreamEvent:
        """The event after all work that was issued on the stream."""


def current_stream(device: torch.device) -> Stream:
    """The stream that is current on ``device`` whenever it is used."""
    return _CurrentStream(device) if device.type == "cuda" else _NoStream()


def side_stream(device: torch.device) -> Stream:
    """A new stream beside the current one; on the CPU it is the current one."""
    return _CudaStream(torch.cuda.Stream(device)) if device.type == "cuda" else _NoStream()


@final
class _NoEvent(StreamEvent):
    def wait(self) -> None:
        pass  # everything before the event is done

    def synchronize(self) -> None:
        pass  # everything before the event is done

    def query(self) -> bool:
        return True


@final
class _NoStream(Stream):
    """The stream of the CPU, where a call is complete when it returns."""

    queued = False

    def as_current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_for_current(self) -> None:
        pass

    def record_event(self) -> StreamEvent:
        return _NoEvent()


@final
class _CudaEvent(StreamEvent):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = stream.record_event()
        self._device = stream.device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return bool(self._event.query())


@final
class _CudaStream(Stream):
    """A side stream."""

    queued = True

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def as_current(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def wait_for_current(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def record_event(self) -> StreamEvent:
        return _CudaEvent(self._stream)


@final
class _CurrentStream(Stream):
    """The current stream, which simulated ranks share; they wait for each other on the host."""

    queued = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def as_current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_for_current(self) -> None:
        pass  # the stream is the current one

    def record_event(self) -> StreamEvent:
        return _CudaEvent(torch.cuda.current_stream(self._device))


def random_state(device: torch.device) -> Tensor | None:
    """The state of the generator of ``device``; None if it has only torch's default generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore the state of ``random_state``; do nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the default generator and that of ``device`` in the body, and restore both after it.

    Simulated ranks share the generator of a CUDA device, so the body runs on one of them at a time,
    and must not wait for another rank.
    """
    # Unlike torch.manual_seed, this seeds no other CUDA device; unlike torch.default_generator, it
    # is the generator of a simulated rank.
    generator: torch.Generator = vars(torch.random)["default_generator"]
    if device.type != "cuda":
        with torch.random.fork_rng(devices=[]):
            generator.manual_seed(seed)
            yield
        return
    with _seeding, torch.random.fork_rng(devices=[device]), torch.cuda.device(device):
        generator.manual_seed(seed)
        torch.cuda.manual_seed(seed)
        yield
