"""All layouts of a cluster, which of them fit, and which are fastest."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from echelon.errors import ArgumentError
from echelon.planner.cluster import MOST_DEVICES, Cluster
from echelon.planner.device import MOST_BYTES, Device
from echelon.planner.layout import HostStates, Layout
from echelon.planner.layout_space import LayoutFamily, SearchLimits, families, host_bytes
from echelon.planner.memory_table import MemoryTable
from echelon.planner.operations import PlannedModel
from echelon.planner.refusal import RefusedPlan
from echelon.planner.simulated_step import simulated_steps, simulated_time
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.stage_schedule import SCHEDULES
from echelon.planner.step_memory import StepMemory, step_memory
from echelon.planner.step_time import ROUNDING, LayoutTimer, StepTime

# What an allocator keeps besides what is allocated, and what the context of a device takes.
RESERVED = 0.08
CONTEXT_BYTES = 1.5e9
SIMULATED = 50  # layouts that the closed form finds fastest are simulated


@final
@dataclass(frozen=True, kw_only=True)
class PlannedLayout:
    """A layout with what it takes.

    Attributes:
        layout: the degrees of all axes.
        time: of a step.
        memory: of the rank that needs most.
        limit: bytes that may be allocated on one device.
    """

    layout: Layout
    time: StepTime
    memory: StepMemory
    limit: float


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
    nearest: RefusedPlan | None
    num_layouts: int
    num_fitting: int


def search(
    model: PlannedModel, cluster: Cluster, stack: SoftwareStack, limits: SearchLimits
) -> SearchResult:
    """The fastest layouts that fit.

    Families of layouts are looked at from the one with the smallest lower bound on, until the bound
    is above the slowest time that is kept. The fastest ``SIMULATED`` are simulated on the action
    lists of their schedules, and ordered by that. Ties are broken by simplicity: fewer axes, then
    smaller degrees.

    Raises:
        ArgumentError: no layout divides the ranks and the batch, or states are to be offloaded to
            hosts of unknown memory.
    """
    if cluster.host is None and limits.fixed.get("offload", "none") != "none":
        raise ArgumentError(
            f"offload is {limits.fixed['offload']!r}, and the memory of the hosts is not known: "
            "give host in the cluster's file"
        )
    limit = limits.max_memory
    if limit is None:
        limit = usable_bytes(cluster.device)
    memory = MemoryTable(model, stack)
    fitting, count = list[LayoutFamily](), _Count()
    for family in families(model, cluster, limits):
        if count.add(family, memory.peaks(family), limit):
            fitting.append(family)
    if not count.num_layouts:
        raise ArgumentError(_why_no_layout(model, cluster, limits))
    timer = LayoutTimer(model, cluster, stack)
    ranked = fastest(timer, memory, fitting, limit, max(SIMULATED, limits.keep))
    simulated = sorted(simulated_steps(timer, ranked), key=_order)
    return SearchResult(
        best=tuple(
            PlannedLayout(
                layout=layout, time=time, memory=step_memory(model, layout, stack), limit=limit
            )
            for layout, time in simulated[: limits.keep]
        ),
        nearest=count.nearest(model, stack, limit),
        num_layouts=count.num_layouts,
        num_fitting=count.num_fitting,
    )


def _why_no_layout(model: PlannedModel, cluster: Cluster, limits: SearchLimits) -> str:
    sentence = (
        f"no plan divides {cluster.num_devices} devices, {model.layers} blocks, {model.heads} "
        f"heads and a global batch of {limits.global_batch}"
        + (f" with {dict(limits.fixed)}" if limits.fixed else "")
        + ": change the batch or the fixed axes"
        + (", or look at tp, cp and ep with axes='all'" if limits.plans_only else "")
    )
    if cluster.host is None or limits.fixed.get("offload", "none") == "none":
        return sentence
    roomy = replace(cluster, host=replace(cluster.host, memory=MOST_BYTES))
    needs = [
        host_bytes(model, family.base.pp, choice.shard) * cluster.devices_per_host
        for family in families(model, roomy, limits)
        for choice in family.shards
    ]
    if needs:
        return (
            f"offload is {limits.fixed['offload']!r}, for which a host would keep "
            f"{min(needs) / 2**30:.1f} GiB or more, and it has {cluster.host.memory / 2**30:.1f} "
            "GiB: take more hosts, or do not offload"
        )
    return (
        f"{sentence}. What is offloaded are shards: shard is more than 1, tp, cp and ep are 1, "
        "'all' takes no pipeline, and a model whose head is its embedding takes none either"
    )


def usable_bytes(device: Device) -> float:
    """What may be allocated: the memory without what the allocator reserves and the context."""
    return max(0.0, device.memory - CONTEXT_BYTES) / (1 + RESERVED)


def fastest(
    timer: LayoutTimer,
    memory: MemoryTable,
    fitting: Sequence[LayoutFamily],
    limit: float,
    keep: int,
) -> list[tuple[Layout, StepTime]]:
    """The fastest layouts of some families, from the fastest on.

    Times are those of closed forms, and of simulations where a schedule has none. A family whose
    lower bound is above the slowest time that is kept has none of the fastest, and neither have
    those after it. Layouts without a closed form come last, and are simulated from the one with the
    least bubble on, until that alone is too slow.
    """
    best = _Fastest(keep)
    bounds = sorted(
        (timer.least_seconds(family.base), number) for number, family in enumerate(fitting)
    )
    bounded = list[tuple[float, int, Layout, StepTime]]()
    for bound, number in bounds:
        if bound > best.slowest:
            break
        family = fitting[number]
        for schedule, row in zip(family.schedules, memory.peaks(family), strict=True):
            for shard, peak in zip(family.shards, row, strict=True):
                if peak > limit:
                    continue
                layout = family.layout(schedule, shard)
                time = timer.step_time(layout)
                if layout.has_closed_form:
                    best.add(layout, time)
                elif time.total * (1 - ROUNDING) <= best.slowest:
                    bounded.append((time.total * (1 - ROUNDING), len(bounded), layout, time))
    for bound, _, layout, time in sorted(bounded):
        if bound > best.slowest:
            break
        best.add(layout, simulated_time(timer, layout, time))
    return [(layout, time) for _, layout, time in best.entries]


class _Fastest:
    """So many of the layouts that are added, from the fastest on."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self.entries = list[tuple[tuple[float, ...], Layout, StepTime]]()

    @property
    def slowest(self) -> float:
        """The time of the last one; infinite while there is room for more."""
        return self.entries[-1][0][0] if len(self.entries) == self._keep else math.inf

    def add(self, layout: Layout, time: StepTime) -> None:
        """Add a layout, unless it is slower than all that are kept."""
        entry = (_order((layout, time)), layout, time)
        if len(self.entries) < self._keep or entry[0] < self.entries[-1][0]:
            bisect.insort(self.entries, entry, key=lambda kept: kept[0])
            del self.entries[self._keep :]


class _Count:
    """How many layouts there are and fit, and which of the others needs least memory."""

    def __init__(self) -> None:
        self.num_layouts = self.num_fitting = 0
        self._least: tuple[float, LayoutFamily, int, int] | None = None

    def add(self, family: LayoutFamily, peaks: list[list[float]], limit: float) -> bool:
        """Count the layouts of a family; whether one of them fits."""
        num_fitting = 0
        for row_number, row in enumerate(peaks):
            above = [peak for peak in row if peak > limit]
            num_fitting += len(row) - len(above)
            least = min(above, default=math.inf)
            if above and (self._least is None or least < self._least[0]):
                self._least = (least, family, row_number, row.index(least))
        self.num_layouts += family.num_layouts
        self.num_fitting += num_fitting
        return num_fitting > 0

    def nearest(
        self, model: PlannedModel, stack: SoftwareStack, limit: float
    ) -> RefusedPlan | None:
        """The layout that needs least memory of those that do not fit."""
        if self._least is None:
            return None
        _, family, schedule, shard = self._least
        layout = family.layout(family.schedules[schedule], family.shards[shard])
        memory = step_memory(model, layout, stack)
        return RefusedPlan(layout=layout, memory=memory, limit=limit)


def _order(timed: tuple[Layout, StepTime]) -> tuple[float, ...]:
    """Time, then the number of axes, then their degrees, then what else is simpler."""
    layout, time = timed
    degrees = (layout.pp, layout.tp, layout.cp, layout.chunks, layout.shard)
    offloads = layout.offload is not HostStates.NOTHING
    simpler = (
        offloads,
        layout.sharded.value,
        list(SCHEDULES).index(layout.schedule_name),
        layout.microbatch,
    )
    return (time.total, sum(degree > 1 for degree in degrees), *map(float, degrees + simpler))


_MOST_TIMES = 2**12


def fitting_cluster(
    model: PlannedModel, cluster: Cluster, stack: SoftwareStack, limits: SearchLimits
) -> Cluster | None:
    """The cluster with 2, 4, 8, ... times as many hosts on which a plan fits; None if none does."""
    limit = usable_bytes(cluster.device) if limits.max_memory is None else limits.max_memory
    memory, times = MemoryTable(model, stack), 2
    while times <= _MOST_TIMES and cluster.num_devices * times <= MOST_DEVICES:
        larger = replace(cluster, hosts=cluster.hosts * times)
        for family in families(model, larger, limits):
            if min(map(min, memory.peaks(family))) <= limit:
                return larger
        times *= 2
    return None
