"""CPU and CUDA behind one face, so that no other file asks for ``device.type``.

On the CPU there is one order of execution and every question about streams has an easy answer;
on CUDA work is queued, so a clock must wait for the device and memory is the allocator's.
"""

from __future__ import annotations

import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["is_cpu", "local_device", "memory_peak", "seeded", "synchronize"]

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
