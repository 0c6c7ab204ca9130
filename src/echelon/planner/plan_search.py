"""All layouts of a cluster, which of them fit, and which are fastest."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import final

from echelon.checks import integer
from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster
from echelon.planner.layout import Layout, Recompute, ShardedStates
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.step_memory import StepMemory, step_memory
from echelon.planner.step_time import StepTime, step_time
from echelon.planner.transformer import Transformer

# What an allocator keeps besides what is allocated, and what the context of a device takes.
RESERVED = 0.08
CONTEXT_BYTES = 1.5e9
_AXES = ("tp", "cp", "ep", "shard", "dp", "pp", "chunks", "microbatch")
_MOST_MICROBATCH = 64


@final
@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A layout with what it takes.

    Attributes:
        layout: the degrees of all axes.
        time: of a step; None where it does not fit.
        memory: of the rank that needs most.
        limit: bytes that may be allocated on one device.
    """

    layout: Layout
    time: StepTime | None
    memory: StepMemory
    limit: float

    @property
    def fits(self) -> bool:
        """Whether the memory is within the limit."""
        return self.memory.total <= self.limit

    def refusal(self) -> str:
        """Why it does not fit: the stage, the bytes, and the largest categories."""
        parts = sorted(self.memory.categories().items(), key=lambda item: -item[1])[:3]
        text = ", ".join(f"{name} {nbytes / 2**30:.1f}" for name, nbytes in parts)
        return (
            f"stage {self.memory.rank_stage} of {self.layout.pp} would have "
            f"{self.memory.total / 2**30:.1f} GiB at the peak of its step ({text}), of "
            f"{self.limit / 2**30:.1f} GiB"
        )


@final
@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The fastest layouts, and how many there were.

    Attributes:
        best: from the fastest on.
        nearest: the layout that needs least memory, of those that do not fit; None if all fit.
        num_layouts: that divide the ranks and the batch.
        num_fitting: of these within the memory.
    """

    best: tuple[PlannedLayout, ...]
    nearest: PlannedLayout | None
    num_layouts: int
    num_fitting: int


@final
@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """What a search may choose.

    Attributes:
        global_batch: sequences of a step.
        fixed: values of axes that are given, such as ``{"pp": 4}``.
        max_memory: bytes of a device that may be allocated; None: its memory without the margin
            for what the allocator reserves and the context.
        keep: how many of the fastest are returned.
    """

    global_batch: int
    fixed: Mapping[str, int] = field(default_factory=dict)
    max_memory: float | None = None
    keep: int = 10

    def __post_init__(self) -> None:
        integer("global_batch", self.global_batch, low=1)
        integer("keep", self.keep, low=1)
        for name, value in self.fixed.items():
            if name not in _AXES:
                raise ArgumentError(f"fixed has {name!r:.40}; give some of {', '.join(_AXES)}")
            integer(name, value, low=1)


def search(
    model: Transformer, cluster: Cluster, stack: SoftwareStack, limits: SearchLimits
) -> SearchResult:
    """Look at every layout that divides the ranks and the batch.

    Ties are broken by simplicity: fewer axes, then smaller degrees.

    Raises:
        ArgumentError: no layout divides the ranks and the batch.
    """
    limit = limits.max_memory
    if limit is None:
        limit = (cluster.device.memory - CONTEXT_BYTES) / (1 + RESERVED)
    heap: list[tuple[tuple[float, ...], int, PlannedLayout]] = []
    nearest: PlannedLayout | None = None
    num_layouts = num_fitting = 0
    for count, layout in enumerate(layouts(model, cluster, limits)):
        num_layouts += 1
        memory = step_memory(model, layout, stack)
        if memory.total > limit:
            if nearest is None or memory.total < nearest.memory.total:
                nearest = PlannedLayout(layout=layout, time=None, memory=memory, limit=limit)
            continue
        num_fitting += 1
        time = step_time(model, layout, cluster, stack)
        planned = PlannedLayout(layout=layout, time=time, memory=memory, limit=limit)
        entry = (tuple(-part for part in _order(planned)), -count, planned)
        if len(heap) < limits.keep:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)
    if not num_layouts:
        raise ArgumentError(
            f"no plan divides {cluster.num_devices} devices, {model.layers} blocks, {model.heads} "
            f"heads and a global batch of {limits.global_batch}"
            + (f" with {dict(limits.fixed)}" if limits.fixed else "")
            + ": change the batch or the fixed axes"
        )
    best = tuple(planned for _, _, planned in sorted(heap, reverse=True))
    return SearchResult(
        best=best, nearest=nearest, num_layouts=num_layouts, num_fitting=num_fitting
    )


def _order(planned: PlannedLayout) -> tuple[float, ...]:
    """Time, then the number of axes, then their degrees."""
    assert planned.time is not None, "only what fits is ordered"
    layout = planned.layout
    degrees = (layout.pp, layout.tp, layout.cp, layout.chunks, layout.shard)
    return (planned.time.total, sum(degree > 1 for degree in degrees), *map(float, degrees))


def layouts(model: Transformer, cluster: Cluster, limits: SearchLimits) -> Iterator[Layout]:
    """Every layout that divides the ranks, the heads, the blocks and the batch."""
    fixed = limits.fixed

    def values(name: str, allowed: list[int]) -> list[int]:
        return [value for value in allowed if fixed.get(name, value) == value]

    devices = cluster.num_devices
    for tp in values("tp", _divisors(min(cluster.devices_per_host, model.heads))):
        if (model.kv_heads % tp and tp % model.kv_heads) or devices % tp:
            continue
        for pp in values("pp", [p for p in _divisors(devices // tp) if p <= model.layers]):
            for cp in values("cp", [c for c in _divisors(devices // tp // pp) if c <= 8]):
                batches = devices // tp // pp // cp
                if limits.global_batch % batches or model.seq % cp:
                    continue
                yield from _with_batches(model, limits, (tp, pp, cp, batches))


def _with_batches(
    model: Transformer, limits: SearchLimits, axes: tuple[int, int, int, int]
) -> Iterator[Layout]:
    tp, pp, cp, batches = axes
    fixed = limits.fixed
    each = limits.global_batch // batches
    microbatches = [size for size in _divisors(each) if size <= _MOST_MICROBATCH]
    chunks = [1] if pp == 1 else [v for v in (1, 2, 4) if model.layers >= pp * v]
    shards = [shard for shard in _divisors(batches) if shard == 1 or shard * 8 >= batches]
    experts = [ep for ep in _divisors(batches) if model.experts % ep == 0 and ep <= model.experts]
    for microbatch, chunk, shard, ep in itertools.product(microbatches, chunks, shards, experts):
        if each // microbatch < pp and pp > 1:
            continue
        chosen = {"microbatch": microbatch, "chunks": chunk, "shard": shard, "ep": ep}
        chosen["dp"] = batches // shard
        if any(fixed.get(name, value) != value for name, value in chosen.items()):
            continue
        what = [ShardedStates.NOTHING] if shard == 1 else _sharded(pp)
        for sharded, recompute in itertools.product(what, (Recompute.NOTHING, Recompute.BLOCKS)):
            yield Layout(
                tp=tp,
                cp=cp,
                pp=pp,
                microbatches=each // microbatch,
                sharded=sharded,
                recompute=recompute,
                sequence_parallel=tp > 1,
                **chosen,
            )


def _sharded(pp: int) -> list[ShardedStates]:
    """In a pipeline, parameters that are gathered stay whole from one microbatch to the next."""
    if pp > 1:
        return [ShardedStates.OPTIMIZER, ShardedStates.GRADIENTS]
    return [ShardedStates.OPTIMIZER, ShardedStates.GRADIENTS, ShardedStates.PARAMETERS]


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
