"""``"cuda"`` in a script means the simulated device, while the body runs.

What is served: devices named ``"cuda"`` in calls of torch, ``.cuda()``, streams, events and the
generator of ``torch.cuda``, its memory statistics, autocast and gradient scalers, and the backend
``"nccl"``. What is not there, such as CUDA graphs, raises an AttributeError or a RuntimeError of
torch. ``tensor.device.type`` is ``"sim"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from echelon.process.replacement import Replacement
from echelon.testing.device import collectives, torch_module

_DEVICE = torch_module.DEVICE
_NAMES = (
    "current_device", "current_stream", "default_stream", "device_count", "empty_cache",
    "get_rng_state", "is_available", "is_initialized", "manual_seed", "manual_seed_all",
    "max_memory_allocated", "memory_allocated", "reset_peak_memory_stats", "set_device",
    "set_rng_state", "set_stream", "synchronize",
)  # fmt: skip


def _served(value: Any) -> Any:
    """A value in which a device of CUDA is the simulated one."""
    is_device = isinstance(value, str | torch.device)
    is_cuda = is_device and str(value).partition(":")[0] == "cuda"
    return torch.device(_DEVICE, torch_module.current_device()) if is_cuda else value


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
        if func is torch.device:
            return _served(func(*args, **(kwargs or {})))
        if func is torch.Tensor.cuda:
            return torch.Tensor.to(args[0], _DEVICE, *args[2:], **(kwargs or {}))
        return func(*map(_served, args), **tree_map(_served, dict(kwargs or {})))


class _Stream(torch.Stream):
    """``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> _Stream:
        return super().__new__(cls, device=_DEVICE, priority=priority)

    def wait_event(self, event: torch.Event) -> None:
        event.wait(self)


class _Event(torch.Event):
    """``torch.cuda.Event``."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, **kwargs: Any) -> _Event:
        return super().__new__(cls, device=_DEVICE)


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
        device(type='sim', index=0)
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

    replaced: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, getattr(torch_module, name)) for name in _NAMES),
        (torch.cuda, "stream", torch_module.stream),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Event),
        (torch.cuda, "is_bf16_supported", lambda *args, **kwargs: True),
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
