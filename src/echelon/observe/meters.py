"""What one rank communicates, and how many bytes of which category it holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.comm import streams
from echelon.events import Event, PeakBytes

Look = Callable[[], Mapping[str, int]]

# Calls on which ranks must agree, but which move no tensors.
_SET_UP = {"subgroup", "window"}


@dataclass(slots=True)
class CommTotal:
    """All calls of one operation by one rank.

    Attributes:
        calls: how many were issued.
        nbytes: sum of the sizes of the tensors that they were about.
        wait_s: seconds that the rank was held up until results were there.
    """

    calls: int = 0
    nbytes: int = 0
    wait_s: float = 0.0


class CommMeter:
    """Communication of one rank per operation, from ``collective`` and ``p2p`` events. A listener.

    Attributes:
        rank: whose events count, in the job.
        totals: by operation, in order of first call.

    Example:
        >>> meter = CommMeter(rank=1)
        >>> meter(Event("collective.issue", 0.0, 0.0, dict(rank=1, op="all_reduce", nbytes=8)))
        >>> meter(Event("collective.wait", 0.0, 0.5, dict(rank=1, op="all_reduce", nbytes=8)))
        >>> meter.totals
        {'all_reduce': CommTotal(calls=1, nbytes=8, wait_s=0.5)}
    """

    def __init__(self, rank: int) -> None:
        self.rank = checks.integer("rank", rank)
        self.totals: dict[str, CommTotal] = {}
        self._lock = threading.Lock()  # hooks of a backward may issue from other threads

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if event.name not in ("collective.issue", "collective.wait"):
            return
        facts = event.facts
        if facts["rank"] != self.rank or facts["op"] in _SET_UP:
            return
        with self._lock:
            total = self.totals.setdefault(facts["op"], CommTotal())
            if event.name == "collective.wait":
                total.wait_s += event.seconds
            else:
                total.calls += 1
                total.nbytes += facts["nbytes"]


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
        PeakBytes(live=200, peak=600)
    """

    def __init__(self, rank: int) -> None:
        self.rank = checks.integer("rank", rank)
        self.totals: dict[str, PeakBytes] = {}
        self._lock = threading.Lock()  # backward may emit from threads of autograd

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if event.name == "memory" and event.facts["rank"] == self.rank:
            with self._lock:
                total = self.totals.setdefault(event.facts["category"], PeakBytes())
                total.add(event.facts["nbytes"])

    def measure(self, nbytes: Mapping[str, int], peaks: Mapping[str, int] | None = None) -> None:
        """Enter how much of each category is held now, as found by looking.

        Args:
            peaks: the most that was held of some of them since the last look.
        """
        with self._lock:
            for category, held in nbytes.items():
                total = self.totals.setdefault(category, PeakBytes())
                total.add(held - total.live)
                total.peak = max(total.peak, (peaks or {}).get(category, 0))

    def process_peak(self, device: torch.device) -> int:
        """The most memory that this process held, in bytes, whatever it was for."""
        return streams.memory_peak(device)


@final
class MemoryTimeline:
    """Bytes by category at every event of one rank. A listener.

    Args:
        rank: whose events count, in the job.
        look: finds the bytes that are held now, by category.

    Example:
        >>> timeline = MemoryTimeline(0, lambda: {"gathered": 400})
        >>> timeline(Event("fsdp.gather", 0.0, 0.0, dict(rank=0, unit="root", nbytes=400)))
        >>> timeline.record()["nbytes"]
        {'gathered': [400, 400]}
    """

    def __init__(self, rank: int, look: Look) -> None:
        self.rank = rank
        self._look = look
        self._lock = threading.Lock()  # communication may emit from a thread of its own
        self._start_s = time.perf_counter()
        self._times_s: list[float] = []
        self._looks: list[Mapping[str, int]] = []
        self._note()

    def __call__(self, event: Event) -> None:
        """Look, if the event is one of this rank."""
        if event.facts.get("rank") == self.rank:
            self._note()

    def _note(self) -> None:
        with self._lock:
            self._times_s.append(time.perf_counter() - self._start_s)
            self._looks.append(self._look())

    def record(self) -> dict[str, Any]:
        """Seconds since the start, and bytes by category, one number for each time."""
        with self._lock:
            names = dict.fromkeys(name for look in self._looks for name in look)
            return {
                "time_s": [round(seconds, 6) for seconds in self._times_s],
                "nbytes": {name: [look.get(name, 0) for look in self._looks] for name in names},
            }


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
