"""How many bytes of which category a rank holds now, and held at most."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.comm import streams
from echelon.events import Event


@dataclass(slots=True)
class MemoryTotal:
    """Bytes of one category.

    Attributes:
        live: bytes held now.
        peak: the most that were held at one time.
    """

    live: int = 0
    peak: int = 0

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes``, which is negative when memory is given back."""
        self.live += nbytes
        self.peak = max(self.peak, self.live)


class MemoryMeter:
    """Live and peak bytes per category of one rank, from ``memory`` events. A listener.

    Memory that nobody emits events for, such as an optimizer's state, is entered with ``measure``.

    Attributes:
        rank: whose events count, in the job.
        totals: by category, in order of first appearance.

    Example:
        >>> meter = MemoryMeter(rank=0)
        >>> for nbytes in (400, 200, -400):
        ...     meter(Event("memory", 0.0, 0.0, dict(rank=0, category="unit", nbytes=nbytes)))
        >>> meter.totals["unit"]
        MemoryTotal(live=200, peak=600)
    """

    def __init__(self, rank: int) -> None:
        self.rank = checks.whole("rank", rank)
        self.totals: dict[str, MemoryTotal] = {}
        self._lock = threading.Lock()  # backward may emit from threads of autograd

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if event.name == "memory" and event.facts["rank"] == self.rank:
            with self._lock:
                total = self.totals.setdefault(event.facts["category"], MemoryTotal())
                total.grow(event.facts["nbytes"])

    def measure(self, nbytes: Mapping[str, int], peaks: Mapping[str, int] | None = None) -> None:
        """Enter how much of each category is held now, as found by looking.

        Args:
            peaks: the most that was held of some of them since the last look.
        """
        with self._lock:
            for category, held in nbytes.items():
                total = self.totals.setdefault(category, MemoryTotal())
                total.grow(held - total.live)
                total.peak = max(total.peak, (peaks or {}).get(category, 0))

    def process_peak(self, device: torch.device) -> int:
        """The most memory that this process held, in bytes, whatever it was for."""
        return streams.memory_peak(device)


@runtime_checkable
class HasBuffers(Protocol):
    """A model that holds memory beside what ``parameters()`` shows."""

    def buffer_bytes(self) -> dict[str, tuple[int, int]]:
        """By category: bytes now, and the most so far."""


def hidden_bytes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """What the wrappers in ``model`` hold for communication: bytes now, and the most so far.

    Those of a ``DDP`` tell by events.
    """
    found: dict[str, tuple[int, int]] = {}
    for module in model.modules():
        if isinstance(module, HasBuffers):
            for category, (live, peak) in module.buffer_bytes().items():
                before = found.get(category, (0, 0))
                found[category] = before[0] + live, before[1] + peak
    return found


def tensor_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """Bytes of parameters, buffers, gradients and optimizer state that are allocated now.

    Tied tensors count once, in the first category that has them. A gradient that is a view of a
    larger buffer counts its own bytes.

    Example:
        >>> tensor_bytes(nn.Linear(10, 10, bias=False))
        {'parameters': 400, 'buffers': 0, 'gradients': 0, 'optimizer state': 0}
    """
    checks.instance("model", model, nn.Module)
    checks.instance("optimizer", optimizer, torch.optim.Optimizer, or_none=True)
    parameters = list(model.parameters())
    states = optimizer.state.values() if optimizer is not None else ()
    categories: dict[str, Iterable[Tensor]] = {
        "parameters": parameters,
        "buffers": model.buffers(),
        "gradients": [p.grad for p in parameters if p.grad is not None],
        "optimizer state": [
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ],
    }
    seen: set[int] = set()
    found = {}
    for category, tensors in categories.items():
        found[category] = 0
        for tensor in tensors:
            if tensor.numel() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                found[category] += tensor.nbytes
    return found
