"""What scripts ask of ``torch.cuda`` beside streams, and how they read devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echelon.testing.device import served_cuda, simulated_device
from tests.device.compiler import needs_compiler

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def cuda() -> Iterator[None]:
    with simulated_device(), served_cuda():
        yield


def test_a_script_reads_cuda_from_devices_and_tensors() -> None:
    device, x = torch.device("cuda"), torch.ones(2, device="cuda")
    assert (device.type, x.device.type, x.is_cuda) == ("cuda", "cuda", True)
    assert x.device == torch.device("cuda", 0)
    assert torch.cuda.Stream().device.type == "cuda"
    assert torch.zeros(2, device=x.device).add(x).tolist() == [1.0, 1.0]
    assert not torch.ones(2).is_cuda


def test_backward_reads_cuda_too() -> None:
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(gradient.device.type)
            return gradient * torch.full((2,), 2.0).cuda()

    x = torch.ones(2, device="cuda", requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert seen == ["cuda"]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]


def test_another_thread_reads_cuda_too() -> None:
    seen = []
    thread = threading.Thread(
        target=lambda: seen.append(torch.ones(2).cuda().device.type), daemon=True
    )
    thread.start()
    thread.join(10)
    assert seen == ["cuda"]


def test_what_torch_makes_is_an_instance_of_what_is_served() -> None:
    assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(torch.ones(1), torch.Generator)


def test_events_measure_and_are_recorded_on_any_stream() -> None:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    assert torch.cuda.current_stream().record_event(end) is end
    assert start.elapsed_time(end) >= 0


def test_a_generator_of_the_device_draws_the_same_again() -> None:
    drawn = [
        torch.rand(4, device="cuda", generator=torch.Generator("cuda").manual_seed(5)).tolist()
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]


def test_a_checkpoint_is_loaded_to_the_device(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "x.pt")
    for where in ("cuda", torch.device("cuda", 0)):
        assert torch.load(tmp_path / "x.pt", map_location=where).is_cuda


def test_a_compiled_function_runs_as_it_is() -> None:
    assert torch.compile(lambda x: x + 1)(torch.ones(1, device="cuda")).item() == 2


def test_a_script_plans_with_the_memory_and_the_capability_of_a_device() -> None:
    free, total = torch.cuda.mem_get_info()
    x = torch.ones(1024, device="cuda")
    assert torch.cuda.mem_get_info() == (free - x.nbytes, total)
    properties = torch.cuda.get_device_properties(0)
    assert properties.total_memory == total
    assert torch.cuda.get_device_capability() == (properties.major, properties.minor)
    assert torch.cuda.memory_reserved() == torch.cuda.memory_allocated()
    with torch.cuda.device(x.device):
        torch.cuda.nvtx.range_push("a range")
        torch.cuda.nvtx.range_pop()
