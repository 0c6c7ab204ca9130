"""Training steps of a wrapped model on one device, and their figures.

All figures of a variant come from one model: warm-up, timed steps, and one step under the profiler,
which counts kernels and the waits of the host. Units are milliseconds and bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from gpu_device import forget, has_streams, sm_clock, synchronize
from llama import ONE_BILLION, Llama, LlamaConfig
from torch import Tensor, nn
from torch.autograd import DeviceType

__all__ = [
    "WARM_UP",
    "Figures",
    "Trainee",
    "config_of",
    "count_events",
    "counted",
    "facts_of",
    "flops_of",
    "measure",
    "small",
    "timed",
]

WARM_UP = 3
_HOST_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")


def config_of(tiny: bool) -> LlamaConfig:
    """A model of 1.1 billion parameters, or a tiny one."""
    return small(ONE_BILLION) if tiny else ONE_BILLION


def small(config: LlamaConfig) -> LlamaConfig:
    """The same shape for a try on a CPU."""
    return replace(
        config, layers=2, width=32, heads=4, key_heads=2, hidden=64, vocabulary=128, batch=2,
        context=16,
    )  # fmt: skip


def flops_of(config: LlamaConfig, num_params: int) -> float:
    """Floating-point operations of forward and backward of one step.

    6 for each token and parameter, except those of the embedding, which is no product, and
    attention's 12 for each pair of a token with itself or an earlier one, channel and layer.
    """
    tokens = config.batch * config.context
    products = 6.0 * tokens * (num_params - config.vocabulary * config.width)
    return products + 6.0 * tokens * config.context * config.width * config.layers


@dataclass(frozen=True)
class Figures:
    """What the timed steps have shown.

    Attributes:
        step_ms: each step, from a synchronized device to a synchronized device.
        forward_ms: until forward was issued.
        backward_ms: from there until backward was issued.
        losses: of all steps, those of the warm-up first.
    """

    step_ms: list[float] = field(default_factory=list)
    forward_ms: list[float] = field(default_factory=list)
    backward_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


class Trainee:
    """A wrapped model with its optimizer and its batch.

    Args:
        wrap: puts a technique around the model, which is in bfloat16 on the device.
        float32: keep the model in float32, for techniques that cast it themselves.
    """

    def __init__(
        self,
        config: LlamaConfig,
        wrap: Callable[[nn.Module], nn.Module],
        device: torch.device,
        *,
        float32: bool = False,
    ) -> None:
        torch.manual_seed(0)
        with device:
            model: nn.Module = Llama(config)
        if not float32:
            model = model.to(torch.bfloat16)
        self.config, self.device = config, device
        self.num_params = sum(param.numel() for param in model.parameters())
        self.model = wrap(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=True)
        generator = torch.Generator().manual_seed(1)
        shape = (config.batch, config.context)
        self.tokens = torch.randint(config.vocabulary, shape, generator=generator).to(device)
        del model
        forget(device)  # what it took to build the model

    def step(self) -> tuple[float, float, Tensor]:
        """One step; the times at which forward and backward were issued, and the loss."""
        loss = self.model(self.tokens)
        forward_s = time.perf_counter()
        loss.backward()
        backward_s = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return forward_s, backward_s, loss.detach()

    def steps(self, count: int) -> Figures:
        """Timed steps."""
        figures = Figures()
        for _ in range(count):
            synchronize(self.device)
            start_s = time.perf_counter()
            forward_s, backward_s, loss = self.step()
            synchronize(self.device)
            figures.step_ms.append(_ms(time.perf_counter() - start_s))
            figures.forward_ms.append(_ms(forward_s - start_s))
            figures.backward_ms.append(_ms(backward_s - forward_s))
            figures.losses.append(loss.item())
        return figures


def measure(
    variant: str,
    config: LlamaConfig,
    wrap: Callable[[nn.Module], nn.Module],
    device: torch.device,
    *,
    num_steps: int,
    float32: bool = False,
) -> dict[str, Any]:
    """Train some steps; what the page tells of a variant."""
    forget(device)
    trainee = Trainee(config, wrap, device, float32=float32)
    first = trainee.steps(WARM_UP)
    facts = {"variant": variant, **facts_of(trainee)}
    return {**facts, **timed(trainee, num_steps, first), **counted(trainee)}


def facts_of(trainee: Trainee) -> dict[str, Any]:
    """What a step of a model takes, whatever is around it."""
    config = trainee.config
    return {
        "num_params": trainee.num_params,
        "num_units": config.layers + 1,
        "tokens": config.batch * config.context,
        "flops": flops_of(config, trainee.num_params),
    }


def timed(trainee: Trainee, num_steps: int, first: Figures | None = None) -> dict[str, Any]:
    """The times of some steps, and what the allocator did in them; ``first`` were before."""
    if has_streams(trainee.device):  # to build the model may take more than a step
        torch.cuda.reset_peak_memory_stats(trainee.device)
    before = _allocator(trainee.device)
    figures = trainee.steps(num_steps)
    after = _allocator(trainee.device)
    memory = {
        name: after[name] - before[name] if name in ("device_allocs", "alloc_retries") else value
        for name, value in after.items()
        if value is not None
    }
    return {
        "step_ms": figures.step_ms,
        "forward_ms": figures.forward_ms,
        "backward_ms": figures.backward_ms,
        "losses": (first.losses if first else []) + figures.losses,
        **(memory or dict.fromkeys(after)),
        "clocks": sm_clock(trainee.device),
    }


def _allocator(device: torch.device) -> dict[str, Any]:
    """What torch's allocator says of a device; None where nobody counts."""
    names = ("peak_allocated", "peak_reserved", "device_allocs", "alloc_retries")
    if not has_streams(device):
        return dict.fromkeys(names)
    stats = torch.cuda.memory_stats(device)
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(device),
        "peak_reserved": torch.cuda.max_memory_reserved(device),
        "device_allocs": stats.get("num_device_alloc", 0),
        "alloc_retries": stats.get("num_alloc_retries", 0),
    }


def counted(trainee: Trainee) -> dict[str, Any]:
    """The kernels of one step, and how often the host waits in it; None without a device.

    The host waits for a stream, for an event, or for a copy from or to memory that is not pinned.
    """
    if not has_streams(trainee.device):
        return {"kernels": None, "launches": None, "host_waits": None}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    synchronize(trainee.device)
    with torch.profiler.profile(activities=activities) as profiler:
        trainee.step()
        synchronize(trainee.device)
    assert profiler.profiler is not None
    return count_events(profiler.profiler.kineto_results.events())


def count_events(events: Iterable[Any]) -> dict[str, int]:
    """The same of the events of a profiler."""
    kernels = launches = waits = 0
    for event in events:
        name = event.name()
        if event.device_type() == DeviceType.CUDA:
            is_copy = name.startswith(("Memcpy", "Memset"))
            kernels += not is_copy
            waits += is_copy and "Pageable" in name
        else:
            launches += name.startswith(_LAUNCHES)
            waits += name.startswith(_HOST_WAITS)
    return {"kernels": kernels, "launches": launches, "host_waits": waits}


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 4)
