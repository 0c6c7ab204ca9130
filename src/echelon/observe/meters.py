"""Listeners that count what one rank communicates, and the bytes that it holds by category."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from echelon import checks
from echelon.comm.streams import device_of
from echelon.events import Event, PeakBytes
from echelon.modules.sharded_tensor import local_shard, memory_of_gradient

Look = Callable[[], Mapping[str, int]]

# Calls on which ranks must agree, but which communicate no tensors.
_SET_UP = {"subgroup", "window"}


@dataclass(slots=True)
class CommTotal:
    """All calls of one operation by one rank.

    Attributes:
        calls: the number of calls that were issued.
        nbytes: the sum of the sizes of their tensors.
        wait_s: seconds that the rank waited for their results.
    """

    calls: int = 0
    nbytes: int = 0
    wait_s: float = 0.0


class CommMeter:
    """A listener that counts the communication of one rank by operation.

    Attributes:
        rank: the rank in the job whose events count.
        totals: the totals by operation, in the order of the first calls.
        by_group: the same for each group, by its name.

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
        self.by_group: dict[str, dict[str, CommTotal]] = {}
        self._lock = threading.Lock()  # hooks of a backward may issue from other threads

    def __call__(self, event: Event) -> None:
        """Count one event."""
        if event.name not in ("collective.issue", "collective.wait"):
            return
        facts = event.facts
        if facts["rank"] != self.rank or facts["op"] in _SET_UP:
            return
        with self._lock:
            group = self.by_group.setdefault(facts.get("group", ""), {})
            for totals in (self.totals, group):
                total = totals.setdefault(facts["op"], CommTotal())
                if event.name == "collective.wait":
                    total.wait_s += event.seconds
                else:
                    total.calls += 1
                    total.nbytes += facts["nbytes"]


class MemoryMeter:
    """A listener that counts the live and peak bytes of one rank by category.

    Memory without ``memory`` events, such as an optimizer's state, is entered with ``measure``.

    Attributes:
        rank: the rank in the job whose events count.
        totals: the totals by category, in the order of their first events.

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
        """Enter the bytes of each category that are held now.

        Args:
            peaks: the peak bytes of some of the categories since the last call.
        """
        with self._lock:
            for category, live in nbytes.items():
                total = self.totals.setdefault(category, PeakBytes())
                total.add(live - total.live)
                total.peak = max(total.peak, (peaks or {}).get(category, 0))

    def process_peak(self, device: torch.device) -> int:
        """The peak of all memory of this process, in bytes."""
        return device_of(device).memory_peak()


class SaveMeter:
    """A listener that keeps what one rank has saved since it was asked last.

    Example:
        >>> meter = SaveMeter(rank=0)
        >>> meter(Event("checkpoint.save", 2.0, 0.5, dict(rank=0, step=9, nbytes=8)))
        >>> meter.take()
        [Event(name='checkpoint.save', start_s=2.0, seconds=0.5, facts={'rank': 0, 'step': 9, \
'nbytes': 8})]
        >>> meter.take()
        []
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._saves: list[Event] = []
        self._lock = threading.Lock()  # an asynchronous save ends on a thread of its own

    def __call__(self, event: Event) -> None:
        """Keep it, if it is a save of this rank."""
        if event.name == "checkpoint.save" and event.facts["rank"] == self._rank:
            with self._lock:
                self._saves.append(event)

    def take(self) -> list[Event]:
        """The saves since the last call."""
        with self._lock:
            saves, self._saves = self._saves, []
        return saves


@final
class MemoryTimeline:
    """A listener that records the bytes by category at every event of one rank.

    It also records when which unit of an ``FSDP`` was unsharded: where ranks share memory, that
    costs no bytes. ``look`` returns the bytes that are held now, by category.

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
        self._whole: dict[str, tuple[float, int]] = {}  # unsharded units: since when, bytes
        self._units: list[tuple[str, float, float, int]] = []
        self._note()

    def __call__(self, event: Event) -> None:
        """Record the bytes now, if it is an event of this rank."""
        if event.facts.get("rank") == self.rank:
            seconds = self._note()
            if event.name.startswith("fsdp."):
                self._note_unit(event, seconds)

    def _note(self) -> float:
        with self._lock:
            self._times_s.append(time.perf_counter() - self._start_s)
            self._looks.append(self._look())
            return self._times_s[-1]

    def _note_unit(self, event: Event, seconds: float) -> None:
        unit = event.facts["unit"]
        with self._lock:
            if event.name != "fsdp.release":
                self._whole.setdefault(unit, (seconds, event.facts["nbytes"]))
            elif unit in self._whole:
                start_s, nbytes = self._whole.pop(unit)
                self._units.append((unit, start_s, seconds, nbytes))

    def record(self) -> dict[str, Any]:
        """What a line of ``memory`` says: times are in seconds since the start."""
        with self._lock:
            names = dict.fromkeys(name for look in self._looks for name in look)
            end_s = self._times_s[-1]
            still = [(unit, start, end_s, n) for unit, (start, n) in self._whole.items()]
            units = sorted([*self._units, *still], key=lambda span: span[1])
            return {
                "units": [
                    [unit, round(start, 6), round(end, 6), n] for unit, start, end, n in units
                ],
                "time_s": [round(seconds, 6) for seconds in self._times_s],
                "nbytes": {name: [look.get(name, 0) for look in self._looks] for name in names},
            }


@runtime_checkable
class HasBuffers(Protocol):
    """A model that holds memory besides its ``parameters()``."""

    def buffer_bytes(self) -> dict[str, tuple[int, int]]:
        """The live and the peak bytes by category."""


def hidden_bytes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The live and the peak bytes, by category, that wrappers in ``model`` hold for communication.

    A ``DDP`` emits ``memory`` events instead.
    """
    nbytes: dict[str, tuple[int, int]] = {}
    for module in model.modules():
        if isinstance(module, HasBuffers):
            for category, (live, peak) in module.buffer_bytes().items():
                before = nbytes.get(category, (0, 0))
                nbytes[category] = before[0] + live, before[1] + peak
    return nbytes


def tensor_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, int]:
    """The bytes of parameters, buffers, gradients and optimizer state that are allocated now.

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
        "gradients": [
            held for p in parameters if p.grad is not None for held in memory_of_gradient(p.grad)
        ],
        "optimizer state": [
            value for state in states for value in state.values() if isinstance(value, Tensor)
        ],
    }
    seen: set[int] = set()
    nbytes = dict.fromkeys(categories, 0)
    for category, tensors in categories.items():
        for tensor in map(local_shard, tensors):
            if tensor.numel() and tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                nbytes[category] += tensor.nbytes
    return nbytes
