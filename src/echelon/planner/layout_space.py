"""Every layout that divides the ranks, the blocks, the heads and the batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, final

from echelon.checks import integer, mapping, one_of, positive
from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster
from echelon.planner.layout import HostStates, Layout, Recompute, ShardedStates
from echelon.planner.operations import PlannedModel
from echelon.planner.schedule_cost import SCHEDULES
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.stage_schedule import schedule_choices

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

    @property
    def offload(self) -> int | str:
        """What is to be offloaded: that of ``fixed``, and nothing where it is not given."""
        return self.fixed.get("offload", HostStates.NOTHING.value)

    def allows(self, **chosen: int | str) -> bool:
        """Whether no fixed axis has another value."""
        return all(self.fixed.get(name, value) == value for name, value in chosen.items())

    def among(self, axis: str, values: Iterable[int]) -> list[int]:
        """Those of the values of an axis that it may have."""
        return [value for value in values if self.fixed.get(axis, value) == value]


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

    def layout(self, schedule: ScheduleChoice, shard: ShardChoice) -> Layout:
        """One of them."""
        return replace(self.base, **schedule._asdict(), **shard._asdict())

    def choices(self) -> Iterator[tuple[ScheduleChoice, ShardChoice]]:
        """In what its layouts differ, in their order."""
        return itertools.product(self.schedules, self.shards)

    def layouts(self) -> Iterator[Layout]:
        """All of them."""
        return itertools.starmap(self.layout, self.choices())


@final
@dataclass(frozen=True)
class LayoutSpace:
    """Every layout of a model on a cluster, those together that compute the same.

    Attributes:
        model: that is trained.
        cluster: on which.
        stack: by which software.
        limits: what may be chosen.
    """

    model: PlannedModel
    cluster: Cluster
    stack: SoftwareStack
    limits: SearchLimits

    @property
    def limit(self) -> float:
        """Bytes that may be allocated on one device."""
        given = self.limits.max_memory
        return self.cluster.device.usable_bytes if given is None else given

    def on(self, cluster: Cluster) -> LayoutSpace:
        """The space of another cluster."""
        return replace(self, cluster=cluster)

    def families(self) -> Iterator[LayoutFamily]:
        """All layouts, those together that compute the same."""
        model, among, devices = self.model, self.limits.among, self.cluster.num_devices
        for tp in among("tp", _divisors(min(self.cluster.devices_per_host, model.heads))):
            if (model.kv_heads % tp and tp % model.kv_heads) or devices % tp:
                continue
            for pp in among("pp", _divisors(devices // tp)):
                if pp > model.layers:
                    break
                for cp in among("cp", _divisors(devices // tp // pp)):
                    batches = devices // tp // pp // cp
                    if cp <= _MOST_CP and not (
                        self.limits.global_batch % batches or model.seq % cp
                    ):
                        yield from self._with_batches(tp, pp, cp, batches)

    def _with_batches(self, tp: int, pp: int, cp: int, batches: int) -> Iterator[LayoutFamily]:
        limits, model = self.limits, self.model
        each = limits.global_batch // batches
        sizes = [size for size in _divisors(each) if size <= _MOST_MICROBATCH]
        experts = [ep for ep in _divisors(batches) if ep == 1 or model.experts % ep == 0]
        on_device = tuple(self._shards(batches, pp))
        on_host = tuple(self._offloaded(pp, on_device)) if tp * cp == 1 else ()
        for microbatch in limits.among("microbatch", sizes):
            schedules = tuple(self._schedules(pp, each // microbatch))
            for ep in limits.among("ep", experts):
                shards = tuple(
                    choice
                    for choice in (*on_device, *(on_host if ep == 1 else ()))
                    if limits.allows(offload=choice.offload.value)
                )
                recomputes = (Recompute.NOTHING, Recompute.BLOCKS) if schedules and shards else ()
                for recompute in recomputes:
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

    def _schedules(self, pp: int, microbatches: int) -> Iterator[ScheduleChoice]:
        for name, chunks in schedule_choices(pp, self.model.layers, microbatches):
            known = name or ("interleaved" if chunks > 1 else "1f1b")
            if self.limits.allows(chunks=chunks, schedule=known):
                yield ScheduleChoice(name, chunks)

    def _shards(self, batches: int, pp: int) -> Iterator[ShardChoice]:
        """Nothing is sharded, or the optimizer, gradients or parameters are.

        In a pipeline, parameters that are gathered stay whole from one microbatch to the next.
        """
        for shard in _divisors(batches):
            dp = batches // shard
            if not self.limits.allows(shard=shard, dp=dp):
                continue
            if shard == 1:
                yield ShardChoice(1, dp, ShardedStates.NOTHING)
            elif dp <= _MOST_REPLICAS_OF_SHARDS:
                if not self.limits.plans_only or dp == 1:  # ec.Plan has no replicas of such shards
                    yield ShardChoice(shard, dp, ShardedStates.OPTIMIZER)
                yield ShardChoice(shard, dp, ShardedStates.GRADIENTS)
                if pp == 1:
                    yield ShardChoice(shard, dp, ShardedStates.PARAMETERS)

    def _offloaded(self, pp: int, shards: tuple[ShardChoice, ...]) -> Iterator[ShardChoice]:
        """Those of which the host may keep states, as far as it has the memory.

        ``Offload.ALL`` is for parameters that are gathered each time; others are whole in a step.
        """
        host, model = self.cluster.host, self.model
        if host is None or (model.tied and pp > 1):  # these are computed in float32
            return
        room = host.memory / self.cluster.devices_per_host
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
