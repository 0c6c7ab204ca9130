"""Every layout that divides the ranks, the blocks, the heads and the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

from echelon.checks import integer, mapping, one_of, positive
from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster
from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.operations import PlannedModel
from echelon.planner.stage_schedule import SCHEDULES, schedule_choices

_AXES = ("tp", "cp", "ep", "shard", "dp", "pp", "chunks", "microbatch")
_MOST_MICROBATCH = 64
_MOST_CP = 8
# In float32 the weights, two moments and the gradient, and in 16 bits the weights that the device
# copies and the gradients that come from it.
HOST_BYTES = 20
_MOST_REPLICAS_OF_SHARDS = 8  # more of them have the memory of a smaller shard, and no more speed


@final
@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """What a search may choose.

    Attributes:
        global_batch: sequences of a step.
        fixed: values of axes that are given, such as ``{"pp": 4}``, of ``schedule`` and of
            ``offload``.
        max_memory: bytes of a device that may be allocated; None: its memory without the margin
            for what the allocator reserves and the context.
        keep: how many of the fastest are returned.
        plans_only: whether only what an ``ec.Plan`` says is looked at.
    """

    global_batch: int
    fixed: Mapping[str, int | str] = field(default_factory=dict)
    max_memory: float | None = None
    keep: int = 10
    plans_only: bool = False

    def __post_init__(self) -> None:
        integer("global_batch", self.global_batch, low=1)
        integer("keep", self.keep, low=1)
        if self.max_memory is not None:
            positive("max_memory", self.max_memory)
        mapping("fixed", self.fixed)
        for name, value in self.fixed.items():
            if name == "schedule":
                one_of("schedule", value, list(SCHEDULES))
            elif name == "offload":
                one_of("offload", value, [choice.value for choice in HostStates])
            elif name not in _AXES:
                names = ", ".join((*_AXES, "schedule", "offload"))
                raise ArgumentError(f"fixed has {name!r:.40}; give some of {names}")
            else:
                integer(name, value, low=1)

    def allows(self, **chosen: int | str) -> bool:
        """Whether no fixed axis has another value."""
        return all(self.fixed.get(name, value) == value for name, value in chosen.items())


class ShardChoice(NamedTuple):
    """How the ranks that have batches of their own share the states."""

    shard: int
    dp: int
    sharded: ShardedStates
    offload: HostStates = HostStates.NOTHING


class ScheduleChoice(NamedTuple):
    """A schedule of a pipeline, as the fields of a ``Layout``."""

    schedule: str | None
    chunks: int


@final
@dataclass(frozen=True, kw_only=True)
class LayoutFamily:
    """Layouts that compute the same: they differ in the schedule and in what is sharded.

    Attributes:
        base: with all other axes; its states are replicated and its schedule is 1F1B.
        schedules: that it may have.
        shards: ways to share the states.
    """

    base: Layout
    schedules: tuple[ScheduleChoice, ...]
    shards: tuple[ShardChoice, ...]

    @property
    def num_layouts(self) -> int:
        """The number of its layouts."""
        return len(self.schedules) * len(self.shards)

    def layout(self, schedule: ScheduleChoice, shard: ShardChoice) -> Layout:
        """One of them."""
        return replace(self.base, **schedule._asdict(), **shard._asdict())

    def layouts(self) -> Iterator[Layout]:
        """All of them."""
        return itertools.starmap(self.layout, itertools.product(self.schedules, self.shards))


def layouts(model: PlannedModel, cluster: Cluster, limits: SearchLimits) -> Iterator[Layout]:
    """Every layout of a search."""
    for family in families(model, cluster, limits):
        yield from family.layouts()


def families(model: PlannedModel, cluster: Cluster, limits: SearchLimits) -> Iterator[LayoutFamily]:
    """Every layout of a search, those together that compute the same."""
    devices = cluster.num_devices
    for tp in _divisors(min(cluster.devices_per_host, model.heads)):
        if (model.kv_heads % tp and tp % model.kv_heads) or devices % tp:
            continue
        for pp in [p for p in _divisors(devices // tp) if p <= model.layers]:
            for cp in [c for c in _divisors(devices // tp // pp) if c <= _MOST_CP]:
                batches = devices // tp // pp // cp
                if limits.global_batch % batches or model.seq % cp:
                    continue
                if limits.allows(tp=tp, pp=pp, cp=cp):
                    yield from _with_batches(model, cluster, limits, (tp, pp, cp, batches))


def _with_batches(
    model: PlannedModel, cluster: Cluster, limits: SearchLimits, axes: tuple[int, int, int, int]
) -> Iterator[LayoutFamily]:
    tp, pp, cp, batches = axes
    each = limits.global_batch // batches
    sizes = [size for size in _divisors(each) if size <= _MOST_MICROBATCH]
    experts = [ep for ep in _divisors(batches) if ep == 1 or model.experts % ep == 0]
    on_device = tuple(_shards(batches, pp, limits))
    on_host = tuple(_offloaded(model, cluster, pp, on_device)) if tp * cp == 1 else ()
    for microbatch, ep in itertools.product(sizes, experts):
        shards = tuple(
            choice
            for choice in (*on_device, *(on_host if ep == 1 else ()))
            if limits.allows(offload=choice.offload.value)
        )
        if not shards or not limits.allows(microbatch=microbatch, ep=ep):
            continue
        schedules = tuple(
            choice
            for choice in itertools.starmap(
                ScheduleChoice, schedule_choices(pp, model.layers, each // microbatch)
            )
            if _allowed(choice, limits)
        )
        for recompute in (Recompute.NOTHING, Recompute.BLOCKS) if schedules else ():
            base = Layout(
                tp=tp,
                cp=cp,
                ep=ep,
                pp=pp,
                dp=batches,
                microbatch=microbatch,
                microbatches=each // microbatch,
                recompute=recompute,
                sequence_parallel=tp > 1,
            )
            yield LayoutFamily(base=base, schedules=schedules, shards=shards)


def _allowed(choice: ScheduleChoice, limits: SearchLimits) -> bool:
    name = choice.schedule or ("interleaved" if choice.chunks > 1 else "1f1b")
    return limits.allows(chunks=choice.chunks, schedule=name)


def _shards(batches: int, pp: int, limits: SearchLimits) -> Iterator[ShardChoice]:
    """Nothing is sharded, or the optimizer, gradients or parameters are.

    In a pipeline, parameters that are gathered stay whole from one microbatch to the next.
    """
    for shard in _divisors(batches):
        if not limits.allows(shard=shard, dp=batches // shard):
            continue
        if shard == 1:
            yield ShardChoice(1, batches, ShardedStates.NOTHING)
        elif shard * _MOST_REPLICAS_OF_SHARDS >= batches:
            if not limits.plans_only or shard == batches:  # ec.Plan has no replicas of such shards
                yield ShardChoice(shard, batches // shard, ShardedStates.OPTIMIZER)
            yield ShardChoice(shard, batches // shard, ShardedStates.GRADIENTS)
            if pp == 1:
                yield ShardChoice(shard, batches // shard, ShardedStates.PARAMETERS)


def _offloaded(
    model: PlannedModel, cluster: Cluster, pp: int, shards: tuple[ShardChoice, ...]
) -> Iterator[ShardChoice]:
    """Those of which the host may keep states, as far as it has the memory.

    ``Offload.ALL`` is for parameters that are gathered each time; others are whole in a step.
    """
    if cluster.host is None or (model.tied and pp > 1):  # these are computed in float32
        return
    room = cluster.host.memory / cluster.devices_per_host
    for choice in shards:
        if host_bytes(model, pp, choice.shard) > room or choice.shard == 1:
            continue
        yield choice._replace(offload=HostStates.OPTIMIZER)
        if choice.sharded is ShardedStates.PARAMETERS:
            yield choice._replace(offload=HostStates.ALL)


def host_bytes(model: PlannedModel, pp: int, shard: int) -> float:
    """Bytes that the host keeps for one rank of the fullest stage, without tensor parallelism."""
    elements = -(-model.layers // pp) * model.block_parameters
    elements += model.embedding_parameters + model.head_parameters
    return HOST_BYTES * elements / shard


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})
