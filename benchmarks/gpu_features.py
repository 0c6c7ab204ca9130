"""One step each of what a training script may add to FSDP, beside the same step without FSDP.

A line fails if it raises, or if its loss after two steps is not that of the plain model. What FSDP
refuses has to be refused with a sentence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from gpu_device import arguments, has_streams, synchronize
from gpu_step import small
from gpu_variants import sharded
from llama import ONE_BILLION, Block, Llama
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import echelon as ec
from tests.cuda.lines import LeftOut, Line, run_lines
from tests.cuda.training import on_one_rank

CONFIG = small(ONE_BILLION)
STEPS = 2
LINE_S = 45.0  # a compiler needs most of it

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True, kw_only=True)
class Feature:
    """What is added to a training step.

    Attributes:
        change: of the model, before FSDP is put around it.
        around: entered around each forward and backward.
        optimizer: of the parameters.
        device_only: why the CPU cannot run it, if so.
    """

    change: Callable[[nn.Module], object] = field(default=lambda model: None)
    around: Callable[[torch.device], AbstractContextManager[object]] = field(
        default=lambda device: nullcontext()
    )
    optimizer: Optimizer = field(default=lambda params: torch.optim.AdamW(params, lr=0.01))
    device_only: str = ""


def compiled(backend: str) -> Callable[[nn.Module], object]:
    """Every block is compiled by itself."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Block):
                module.compile(backend=backend)

    return change


def recomputed(*, reentrant: bool) -> Callable[[nn.Module], object]:
    """The forward of every block runs again in its backward."""

    def change(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, Block):
                forward = module.forward
                module.forward = partial(checkpoint, forward, use_reentrant=reentrant)  # type: ignore[method-assign]

    return change


def dropped(model: nn.Module) -> None:
    """Dropout in every block, whose forward runs again in its backward with the same zeros."""
    for module in model.modules():
        if isinstance(module, Block):
            module.down = nn.Sequential(module.down, nn.Dropout(0.1))  # type: ignore[assignment]
    recomputed(reentrant=False)(model)


def autocast(device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, torch.bfloat16)


@contextmanager
def other_stream(device: torch.device) -> Iterator[None]:
    """A stream of the user's, on which the step runs from end to end."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def fused(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def capturable(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, capturable=True, foreach=True)


FEATURES = {
    "activation checkpoints": Feature(change=recomputed(reentrant=False)),
    "activation checkpoints, reentrant": Feature(change=recomputed(reentrant=True)),
    "dropout in activation checkpoints": Feature(change=dropped),
    "autocast": Feature(around=autocast),
    "fused AdamW": Feature(optimizer=fused),
    "capturable AdamW": Feature(optimizer=capturable, device_only="it needs a CUDA device"),
    "a stream of the user's": Feature(around=other_stream, device_only="the CPU has no streams"),
}
COMPILED = {  # which takes longest
    "compile per block, aot_eager": Feature(change=compiled("aot_eager")),
    "compile per block, inductor": Feature(
        change=compiled("inductor"), device_only="its kernels for a CPU take minutes to build"
    ),
}


def losses_of(
    feature: Feature, wrap: Callable[[nn.Module], nn.Module], device: torch.device
) -> Tensor:
    """The losses of some steps, with the same weights, tokens and random numbers each time."""
    torch.manual_seed(0)
    with device:
        plain = Llama(CONFIG)
    feature.change(plain)
    model = wrap(plain)
    optimizer = feature.optimizer(list(model.parameters()))
    generator = torch.Generator().manual_seed(1)
    shape = (CONFIG.batch, CONFIG.context)
    tokens = torch.randint(CONFIG.vocabulary, shape, generator=generator).to(device)
    losses = []
    torch.manual_seed(2)
    for _ in range(STEPS):
        with feature.around(device):
            loss = model(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    synchronize(device)
    return torch.stack(losses).float().cpu()


def compared(feature: Feature, world: ec.World) -> Mapping[str, Any]:
    """The losses with FSDP are those without."""
    device = world.device
    expected = losses_of(feature, lambda model: model, device)
    losses = losses_of(feature, lambda model: sharded(model, world.group), device)
    # Other kernels may be chosen where memory is aligned differently.
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    return {"equal_bits": torch.equal(losses, expected)}


def channels_last(world: ec.World) -> Mapping[str, Any]:
    """A convolution over images whose channels are last in memory, in DDP and in FSDP."""
    device = world.device

    def loss_of(wrap: Callable[[nn.Module], nn.Module]) -> Tensor:
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)]
        plain = nn.Sequential(*layers).to(device, memory_format=torch.channels_last)
        model = wrap(plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(1))
        images = images.to(device, memory_format=torch.channels_last)
        for _ in range(STEPS):
            loss = model(images).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        result: Tensor = loss.detach().cpu()
        return result

    expected = loss_of(lambda model: model)
    for wrap in (
        lambda model: ec.DDP(model, world.group),
        lambda model: ec.FSDP(model, world.group, min_num_params=0),
    ):
        torch.testing.assert_close(loss_of(wrap), expected, rtol=1e-3, atol=1e-4)
    return {}


def graph_is_refused(world: ec.World) -> Mapping[str, Any]:
    """A CUDA graph of a sharded model is refused with a sentence, and training goes on after it."""
    device = world.device
    if not has_streams(device):
        raise LeftOut("CUDA graphs, which need a CUDA device")
    model = sharded(Llama(CONFIG).to(device), world.group)
    tokens = torch.zeros(CONFIG.batch, CONFIG.context, dtype=torch.int64, device=device)
    model(tokens).backward()
    sentence = ""
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            model(tokens)
    except ec.UnsupportedError as error:
        sentence = str(error)
    assert sentence, "a graph was captured over units whose memory moves"
    model(tokens).backward()
    synchronize(device)
    return {"sentence": sentence}


def line_of(feature: Feature, device: str) -> Mapping[str, Any]:
    """Compare on one rank, unless this device cannot."""
    if feature.device_only and device != "cuda":
        raise LeftOut(feature.device_only)
    result: Mapping[str, Any] = on_one_rank(device, partial(compared, feature))
    return result


def main() -> int:
    options, device = arguments(__doc__)
    checks: dict[str, Callable[[ec.World], Mapping[str, Any]]] = {
        "CUDA graphs are refused": graph_is_refused,
        "channels last": channels_last,
    }
    lines: list[tuple[str, Line]] = [
        *((title, partial(line_of, feature, device.type)) for title, feature in FEATURES.items()),
        *((title, partial(on_one_rank, device.type, check)) for title, check in checks.items()),
        *((title, partial(line_of, feature, device.type)) for title, feature in COMPILED.items()),
    ]
    return run_lines(lines, device.type, options.after, LINE_S)


if __name__ == "__main__":
    sys.exit(main())
