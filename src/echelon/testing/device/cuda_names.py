"""``"cuda"`` in a script means the simulated device, while the body runs.

What is served: devices named ``"cuda"`` in calls of torch, ``.cuda()``, streams, events and the
generator of ``torch.cuda``, its memory statistics, autocast and gradient scalers, ``torch.load``,
and the backend ``"nccl"``. What is not there, such as CUDA graphs, raises an AttributeError or a
RuntimeError of torch.

A script asks ``device.type == "cuda"`` before it makes a stream, so its own code reads ``"cuda"``
from tensors and devices. The code of torch reads ``"sim"``: what it does for CUDA needs CUDA.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import Thread
from time import perf_counter
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from echelon.process.replacement import Replacement
from echelon.testing.device import collectives, torch_module

_DEVICE = torch_module.DEVICE
_CUDA = torch.device("cuda", 0)
_NAMES = (
    "can_device_access_peer", "current_device", "device", "device_count", "empty_cache",
    "get_device_capability", "get_device_name", "get_device_properties", "get_rng_state",
    "get_rng_state_all", "initial_seed", "ipc_collect", "is_available", "is_initialized",
    "manual_seed", "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "mem_get_info",
    "memory_allocated", "memory_reserved", "memory_stats", "reset_peak_memory_stats", "seed",
    "set_device", "set_rng_state", "set_stream", "synchronize",
)  # fmt: skip


def _served(value: Any) -> Any:
    """A value in which a device of CUDA is the simulated one."""
    is_device = isinstance(value, str | torch.device)
    is_cuda = is_device and str(value).partition(":")[0] == "cuda"
    return torch.device(_DEVICE, torch_module.current_device()) if is_cuda else value


def _shown(device: torch.device) -> torch.device:
    """A device as a script reads it."""
    return _CUDA if device.type == _DEVICE else device


def _is_of_torch(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "echelon")


@final
class _ServedCalls(TorchFunctionMode):
    """Calls of torch in which ``"cuda"`` is the simulated device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.device or getattr(func, "__self__", None) in _ATTRIBUTES:
            value = func(*args, **(kwargs or {}))
            is_torchs = _is_of_torch(sys._getframe(1).f_globals.get("__name__", ""))
            if isinstance(value, torch.device):
                return _served(value) if is_torchs else _shown(value)
            return value or (not is_torchs and args[0].device.type == _DEVICE)
        if func is torch.Tensor.cuda:
            return torch.Tensor.to(args[0], _DEVICE, *args[2:], **(kwargs or {}))
        return func(*map(_served, args), **tree_map(_served, dict(kwargs or {})))


_ATTRIBUTES = (torch.Tensor.device, torch.Tensor.is_cuda)


class _AnyInstance(type):
    """Classes of which what torch itself makes is an instance, too."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__mro__[1])


class _Stream(torch.Stream, metaclass=_AnyInstance):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> _Stream:
        if kwargs:  # stream_id, device_index and device_type: one that is there
            return super().__new__(cls, **kwargs)
        return super().__new__(cls, device=_DEVICE, priority=priority)

    @classmethod
    def of(cls, stream: torch.Stream) -> _Stream:
        """A stream that torch has made."""
        return cls(
            stream_id=stream.stream_id,
            device_index=stream.device_index,
            device_type=stream.device_type,
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _CUDA

    @property
    def cuda_stream(self) -> int:
        return self.stream_id

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)

    def record_event(self, event: torch.Event | None = None) -> torch.Event:
        event = _Event() if event is None else event
        event.record(self)
        return event


class _Event(torch.Event, metaclass=_AnyInstance):
    """``torch.cuda.Event``; what it measures is the time of the host."""

    _recorded: float

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **kwargs: Any) -> _Event:
        return super().__new__(cls, device=_DEVICE)

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(stream)
        self._recorded = perf_counter()

    def elapsed_time(self, end_event: torch.Event) -> float:
        if not isinstance(end_event, _Event):
            raise TypeError(f"elapsed_time takes a torch.cuda.Event, not {end_event!r}")
        return 1000 * (end_event._recorded - self._recorded)


class _AnyGenerator(_AnyInstance, type(torch.Generator)):  # type: ignore[misc]
    """That of generators has to be derived from their own."""


class _Generator(torch.Generator, metaclass=_AnyGenerator):
    """``torch.Generator``, of CUDA, too."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, device=_served(device))  # type: ignore[call-arg]


def _current_stream(device: Any = None) -> _Stream:
    return _Stream.of(torch_module.current_stream())


def _default_stream(device: Any = None) -> _Stream:
    return _Stream.of(torch_module.default_stream())


def _as_it_is(model: Any = None, **options: Any) -> Any:
    """``torch.compile``, whose kernels are of CUDA, and in the order of the function."""
    return (lambda function: function) if model is None else model


def _no_range(*args: Any, **kwargs: Any) -> None:
    """Of ``torch.cuda.nvtx``."""


def _module_to_device(module: nn.Module, device: Any = None) -> nn.Module:
    return module.to(_DEVICE)


def _backend(name: Any) -> Any:
    """The backend that stands for the one that a script names."""
    if not isinstance(name, str):
        return collectives.NAME
    return collectives.NAME if "nccl" in name or "cuda" in name else name


@contextmanager
def served_cuda() -> Iterator[None]:
    """Let ``"cuda"`` mean the simulated device in the body; afterwards nothing is left patched.

    Example:
        >>> with simulated_device(), served_cuda():  # doctest: +SKIP
        ...     torch.ones(2, device="cuda").device
        device(type='cuda', index=0)
    """
    init = dist.init_process_group

    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        return init(_backend(backend), *args, **kwargs)

    to, autocast, scaler = nn.Module.to, torch.autocast.__init__, torch.amp.GradScaler.__init__

    def module_to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        return to(module, *map(_served, args), **tree_map(_served, kwargs))

    def autocast_init(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        autocast(self, _DEVICE if device_type == "cuda" else device_type, *args, **kwargs)

    def scaler_init(self: Any, device: str = "cuda", *args: Any, **kwargs: Any) -> None:
        scaler(self, _DEVICE if device == "cuda" else device, *args, **kwargs)

    plain_load, plain_run = torch.load, Thread.run

    run_backward = vars(torch.autograd)["_engine_run_backward"]

    def backward(*args: Any, **kwargs: Any) -> Any:
        with _ServedCalls():  # hooks of the script run in it, and calls of torch leave the mode
            return run_backward(*args, **kwargs)

    def run(thread: Thread) -> None:
        with _ServedCalls():  # a mode is of the thread that has entered it
            plain_run(thread)

    def load(file: Any, map_location: Any = None, **kwargs: Any) -> Any:
        return plain_load(file, _served(map_location), **kwargs)

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, getattr(torch_module, name)) for name in _NAMES),
        *((torch.cuda.nvtx, name, _no_range) for name in ("mark", "range_push", "range_pop")),
        (torch.cuda, "current_stream", _current_stream),
        (torch.cuda, "default_stream", _default_stream),
        (torch.cuda, "stream", torch_module.stream),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
        (torch, "Generator", _Generator),
        (Thread, "run", run),
        (torch.autograd, "_engine_run_backward", backward),
        (torch, "load", load),
        (torch, "compile", _as_it_is),
        (nn.Module, "cuda", _module_to_device),
        (nn.Module, "to", module_to),
        (torch.autocast, "__init__", autocast_init),
        (torch.amp.GradScaler, "__init__", scaler_init),
        (dist, "init_process_group", init_process_group),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            replacement = Replacement(owner, name, value)
            replacement.put_in()
            stack.callback(replacement.take_out)
        stack.enter_context(_ServedCalls())
        yield
