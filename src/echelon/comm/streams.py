"""CPU and CUDA behind one face, so that no other file asks for ``device.type``.

On the CPU there is one order of execution and every question about streams has an easy answer;
on CUDA work is queued, so a clock must wait for the device and memory is the allocator's.

[Note: streams]
A *stream* is an order of execution beside the current one. ``wait_for_current`` lets it wait for
the current one, and an event's ``wait`` is the other way round; neither blocks the host, and
neither does a collective that is waited for on the stream. Memory that was made on a stream goes
back to the stream's pool when it is freed, so whoever used it elsewhere calls ``wait_for_current``
before that. On the CPU all of this does nothing.
"""

from __future__ import annotations

import resource
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
    """The device of a process: its own CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def is_cpu(device: torch.device) -> bool:
    """Whether tensors of ``device`` lie in memory that processes of one host can share."""
    return device.type == "cpu"


def autocasts(device: torch.device) -> bool:
    """Whether operations on ``device`` choose their dtype themselves now."""
    return torch.is_autocast_enabled(device.type)


def adds_in_order(device: torch.device) -> bool:
    """Whether ``index_add_`` on ``device`` adds rows that repeat in a fixed order."""
    return device.type == "cpu"


def reading_waits(device: torch.device) -> bool:
    """Whether the host waits for work under way when it reads a value on ``device``."""
    return not is_cpu(device)


def synchronize(device: torch.device) -> None:
    """Return when all work queued on ``device`` is done; at once on the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_peak(device: torch.device) -> int:
    """The most memory this process has held, in bytes: allocated on CUDA, resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host that ``device`` can copy from and to while the host goes on. 1D.

    On CUDA it is pinned; it comes from torch's pool, which gives memory out again only when the
    copies that used it are over.
    """
    return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


class StreamEvent(ABC):
    """A point in the order of execution of a stream."""

    @abstractmethod
    def wait(self) -> None:
        """Let what is issued from now on come after it; the host goes on."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until everything before it is done."""

    @abstractmethod
    def query(self) -> bool:
        """Whether everything before it is done."""


class Stream(ABC):
    """An order of execution. See [Note: streams].

    Attributes:
        queued: collectives issued on it may be waited for at once, and the host goes on.
    """

    queued: bool

    @abstractmethod
    def as_current(self) -> AbstractContextManager[object]:
        """What is issued in the body runs in the order of the stream."""

    @abstractmethod
    def wait_for_current(self) -> None:
        """Let what is issued on the stream from now on come after what is current."""

    @abstractmethod
    def record_event(self) -> StreamEvent:
        """The point after everything that was issued on the stream."""


def new_stream(device: torch.device, *, own: bool) -> Stream:
    """An order of execution on ``device``.

    Args:
        own: beside the current one; if not, or on the CPU, it is the current one.
    """
    if device.type != "cuda":
        return _NoStream()
    return _CudaStream(torch.cuda.Stream(device)) if own else _CurrentStream(device)


@final
class _NoEvent(StreamEvent):
    def wait(self) -> None:
        pass  # it has happened

    def synchronize(self) -> None:
        pass  # it has happened

    def query(self) -> bool:
        return True


@final
class _NoStream(Stream):
    """On the CPU things have happened when a call returns."""

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
    """A stream beside the current one."""

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
    """The current stream: simulated ranks share it, and wait for each other on the host."""

    queued = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def as_current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait_for_current(self) -> None:
        pass  # it is current

    def record_event(self) -> StreamEvent:
        return _CudaEvent(torch.cuda.current_stream(self._device))


def random_state(device: torch.device) -> Tensor | None:
    """The state of the generator of ``device``; None where torch's default one serves it."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Let the generator of ``device`` go on from ``state``; nothing where it has none."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Draw from ``seed`` on in the body; afterwards all goes on as if nothing had been drawn.

    It holds for torch's default generator and for that of ``device``. Simulated ranks share the
    generator of a CUDA device, so there the body runs on one of them at a time: it must not wait
    for another rank.
    """
    # Not torch.manual_seed: that would seed every CUDA device of the process, too.
    # Not torch.default_generator either: a simulated rank finds its own stream here.
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
