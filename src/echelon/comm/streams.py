"""One interface to the streams, memory and generators of the CPU and of accelerators.

No other file asks for ``device.type``: ``device_of`` gives the object that does. On the CPU every
operation is complete when it returns, so streams and events do nothing there. An accelerator is
what ``torch.accelerator`` finds: CUDA, XPU, or the device of an extension of torch. A test that
plays another device sets an entry of ``kinds``, and needs nothing else.

[Note: streams]
A side stream makes progress beside the current stream. ``Stream.wait_for_current`` orders it after
the current stream, and ``StreamEvent.wait`` orders the current stream after an event of it. Neither
blocks the host, and neither does a collective that is waited for on the stream. Memory that was
allocated on a stream returns to the pool of this stream when it is freed. If another stream has
used it, call ``wait_for_current`` first.
"""

from __future__ import annotations

import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

_seeding = threading.Lock()


def accelerator() -> str | None:
    """The kind of device of this host that ranks compute on; None: there is none but the CPU.

    It starts nothing on the device. MPS is none: it has no streams, and no ranks meet over it.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None or device.type == "mps" else device.type


def local_device(local_rank: int, bound: torch.device | None = None) -> torch.device:
    """The accelerator of this process, where it starts a context; without any, the CPU.

    Args:
        bound: to which the script has bound its process group; None: the one of ``local_rank``.
    """
    kind = accelerator()
    if kind is None:
        return torch.device("cpu")
    device = bound or torch.device(kind, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device)
    return device


class StreamEvent:
    """A point in the order of a stream, like ``torch.Event``; this one is of the CPU."""

    def wait(self) -> None:
        """Order the following work of the current stream after the event."""

    def synchronize(self) -> None:
        """Block the host until everything before the event is done."""

    def query(self) -> bool:
        """Whether everything before the event is done."""
        return True


class Stream:
    """A stream, like ``torch.Stream``. See [Note: streams].

    This one is of the CPU, where a call is complete when it returns.

    Attributes:
        queued: whether waiting for a collective on the stream does not block the host.
    """

    queued = False

    def as_current(self) -> AbstractContextManager[object]:
        """Make the stream current in the body."""
        return nullcontext()

    def wait_for_current(self) -> None:
        """Order the following work of the stream after the work of the current stream."""

    def record_event(self) -> StreamEvent:
        """The event after all work that was issued on the stream."""
        return StreamEvent()


class DeviceKind(ABC):
    """What a device can do and what it is; as on the CPU, where a kind does not say otherwise.

    Attributes:
        device: what torch calls it.
        is_host: whether its memory is that of the host, which processes of one host can share.
        reading_waits: whether reading a value makes the host wait for queued work.
        adds_in_order: whether ``index_add_`` adds repeated rows in a fixed order.
    """

    is_host: bool
    reading_waits: bool
    adds_in_order: bool

    def __init__(self, device: torch.device) -> None:
        self.device = device

    # Order -----------------------------------------------------------------------------------

    def current_stream(self) -> Stream:
        """The stream that is current whenever it is used."""
        return Stream()

    def side_stream(self) -> Stream:
        """A new stream beside the current one; on the CPU it is the current one."""
        return Stream()

    @abstractmethod
    def synchronize(self) -> None:
        """Return when all work that is queued is done; at once on the CPU."""

    def is_capturing(self) -> bool:
        """Whether what is issued now is recorded for a CUDA graph and not run."""
        return False

    # Memory ----------------------------------------------------------------------------------

    @abstractmethod
    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host that the device can copy from and to asynchronously. 1D.

        On an accelerator it is pinned memory of torch's pool, which is reused only when the copies
        are done.
        """

    @abstractmethod
    def is_on_host(self, tensor: Tensor) -> bool:
        """Whether the memory of ``tensor``, which is on the device, is that of the host."""

    def resize(self, memory: torch.UntypedStorage, nbytes: int) -> None:
        """Free or allocate the memory of a tensor, in the order of the current stream."""
        memory.resize_(nbytes)

    def copy_from_host(self, tensor: Tensor, *, always: bool) -> Tensor:
        """``tensor`` on the device, copied on the current stream if it is elsewhere or ``always``.

        The host does not wait for the copy.
        """
        return tensor.to(self.device, non_blocking=True, copy=always)

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` in memory of the host, for which the host waits.

        It goes to memory that the device copies to directly, and not by way of a small buffer.
        """
        copy = self.host_memory(tensor.numel(), tensor.dtype).view(tensor.shape)
        copy.copy_(tensor, non_blocking=True)
        self.current_stream().record_event().synchronize()
        return copy

    def numbers(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        """A 1D tensor of a few numbers, for which the host does not wait.

        ``torch.tensor(values, device=...)`` waits until the accelerator has read them.
        """
        host = self.host_memory(len(values), dtype)
        host.copy_(torch.tensor(values, dtype=dtype, device="cpu"))
        return self.copy_from_host(host, always=False)

    @abstractmethod
    def memory_peak(self) -> int:
        """The peak memory of this process in bytes: allocated, or resident on the CPU.

        On the CPU of Windows, which Python cannot ask, it is 0.
        """

    # Facts and generators --------------------------------------------------------------------

    def name(self) -> str:
        """The product that an accelerator is; of others what torch calls them."""
        return str(self.device)

    def has_one_queue(self) -> bool:
        """Whether its streams share a queue, so that one of them can hold up all others."""
        return False

    def identity(self) -> str | None:
        """What tells it from every other device anywhere; None where ranks may share it."""
        return None

    def random_state(self) -> Tensor | None:
        """The state of its generator; None if it has only torch's default generator."""
        return None

    @abstractmethod
    def set_random_state(self, state: Tensor) -> None:
        """Restore the state of ``random_state``; do nothing on the CPU."""

    @abstractmethod
    def seeded(self, seed: int) -> AbstractContextManager[object]:
        """Seed the default generator and its own in the body, and restore both after it.

        Simulated ranks share the generator of an accelerator, so the body runs on one of them at a
        time, and must not wait for another rank.
        """


@final
class _Event(StreamEvent):
    def __init__(self, stream: torch.Stream) -> None:
        self._event = stream.record_event()
        self._device = stream.device

    def wait(self) -> None:
        torch.accelerator.current_stream(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        self._event.synchronize()

    def query(self) -> bool:
        return bool(self._event.query())


@final
class _SideStream(Stream):
    queued = True

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def as_current(self) -> AbstractContextManager[object]:
        return self._stream

    def wait_for_current(self) -> None:
        self._stream.wait_stream(torch.accelerator.current_stream(self._stream.device))

    def record_event(self) -> StreamEvent:
        return _Event(self._stream)


@final
class _CurrentStream(Stream):
    """The current stream, which simulated ranks share; they wait for each other on the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def record_event(self) -> StreamEvent:
        return _Event(torch.accelerator.current_stream(self._device))


class PlainDevice(DeviceKind):
    """The CPU, and devices without streams, such as ``meta``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.is_host = self.adds_in_order = device.type == "cpu"
        self.reading_waits = not self.is_host

    def synchronize(self) -> None:
        pass  # a call is complete when it returns

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu")

    def is_on_host(self, tensor: Tensor) -> bool:
        return self.is_host

    def copy_to_host(self, tensor: Tensor) -> Tensor:
        return tensor.cpu()

    def numbers(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def memory_peak(self) -> int:
        if sys.platform == "win32":
            return 0
        import resource

        unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def set_random_state(self, state: Tensor) -> None:
        pass  # it has only torch's default generator

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            _default_generator().manual_seed(seed)
            yield


class Accelerator(DeviceKind):
    """A device with streams. ``module`` is that of its kind, as ``torch.cuda`` is of CUDA."""

    is_host, reading_waits, adds_in_order = False, True, False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.module: Any = torch.get_device_module(device)

    def current_stream(self) -> Stream:
        return _CurrentStream(self.device)

    def side_stream(self) -> Stream:
        # Before kernels of the current stream, or small copies would wait for large products.
        return _SideStream(torch.Stream(self.device, priority=-1))

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def host_memory(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def is_on_host(self, tensor: Tensor) -> bool:
        return False

    def memory_peak(self) -> int:
        return int(self.module.max_memory_allocated(self.device))

    def random_state(self) -> Tensor | None:
        state: Tensor = self.module.get_rng_state(self.device)
        return state

    def set_random_state(self, state: Tensor) -> None:
        self.module.set_rng_state(state, self.device)

    @contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        own = torch.random.fork_rng(devices=[self.device], device_type=self.device.type)
        with _seeding, own, torch.accelerator.device_index(self.device.index):
            _default_generator().manual_seed(seed)
            self.module.manual_seed(seed)
            yield


@final
class _CudaDevice(Accelerator):
    """What is CUDA's own."""

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def name(self) -> str:
        return torch.cuda.get_device_name(self.device)

    def has_one_queue(self) -> bool:
        return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"

    def identity(self) -> str | None:
        return str(torch.cuda.get_device_properties(self.device).uuid)


@cache
def _without_entry(device: torch.device) -> DeviceKind:
    is_accelerator = device.type == accelerator()
    return Accelerator(device) if is_accelerator else PlainDevice(device)


# By ``device.type``. One object for each device, because a step asks for it at each call.
kinds: dict[str, Callable[[torch.device], DeviceKind]] = {"cuda": cache(_CudaDevice)}


def device_of(device: torch.device) -> DeviceKind:
    """The object that knows what ``device`` can do, and does it.

    Example:
        >>> device_of(torch.device("cpu")).is_host
        True
    """
    return kinds.get(device.type, _without_entry)(device)


def autocasts(device: torch.device) -> bool:
    """Whether autocast is on for a device: asked by layers, so that it looks up no object."""
    return torch.is_autocast_enabled(device.type)


def _default_generator() -> torch.Generator:
    # Unlike torch.manual_seed, this seeds no other CUDA device; unlike torch.default_generator, it
    # is the generator of a simulated rank.
    generator: torch.Generator = vars(torch.random)["default_generator"]
    return generator
