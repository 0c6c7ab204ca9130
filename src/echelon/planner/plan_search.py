"""All layouts of a cluster, which of them fit, and which are fastest."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

from echelon.errors import ArgumentError
from echelon.planner.cluster import MOST_DEVICES, Cluster
from echelon.planner.device import MOST_BYTES
from echelon.planner.layout import HostStates, Layout
from echelon.planner.layout_space import LayoutFamily, LayoutSpace, host_bytes
from echelon.planner.memory_table import MemoryTable
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.refusal import RefusedPlan
from echelon.planner.schedule_cost import SCHEDULES
from echelon.planner.simulated_step import simulated_time
from echelon.planner.step_memory import step_memory
from echelon.planner.step_time import ROUNDING, LayoutTimer, StepTime

SIMULATED = 50  # layouts that the closed form finds fastest are simulated
_MOST_TIMES = 2**12


@final
@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plans, and how many there were.

    Attributes:
        best: from the best on.
        nearest: the layout that needs least memory, of those that do not fit; None if all fit.
        num_layouts: that divide the ranks and the batch.
        num_fitting: of these within the memory.
    """

    best: tuple[PricedPlan, ...]
    nearest: RefusedPlan | None
    num_layouts: int
    num_fitting: int


def search(space: LayoutSpace) -> SearchResult:
    """The fastest layouts that fit.

    Families of layouts are looked at from the one with the smallest lower bound on, until the bound
    is above the slowest time that is kept. The fastest ``SIMULATED`` are simulated on the action
    lists of their schedules, and ordered by that. Ties are broken by simplicity: fewer axes, then
    smaller degrees.

    Raises:
        ArgumentError: no layout divides the ranks and the batch, or states are to be offloaded to
            hosts of unknown memory.
    """
    limits, limit = space.limits, space.limit
    if space.cluster.host is None and limits.offload != "none":
        raise ArgumentError(
            f"offload is {limits.offload!r}, and the memory of the hosts is not known: "
            "give host in the cluster's file"
        )
    memory, fitting = MemoryTable(space.model, space.stack), list[LayoutFamily]()
    num_layouts = num_fitting = 0
    least, nearest = math.inf, None
    for family in space.families():
        peaks = memory.peaks(family)
        above = [peak for peak in peaks if peak > limit]
        num_layouts += len(peaks)
        num_fitting += len(peaks) - len(above)
        if len(above) < len(peaks):
            fitting.append(family)
        if above and min(above) < least:
            least = min(above)
            nearest = family, peaks.index(least)
    if not num_layouts:
        raise ArgumentError(_why_no_layout(space))
    timer = LayoutTimer(space.model, space.cluster, space.stack)
    ranked = fastest(timer, memory, fitting, limit, max(SIMULATED, limits.keep))
    timed = [(layout, simulated_time(timer, layout, time)) for layout, time in ranked]
    timed.sort(key=_order)
    return SearchResult(
        best=tuple(priced(space, layout, time) for layout, time in timed[: limits.keep]),
        nearest=nearest and refused(space, [*nearest[0].layouts()][nearest[1]]),
        num_layouts=num_layouts,
        num_fitting=num_fitting,
    )


def priced(space: LayoutSpace, layout: Layout, time: StepTime) -> PricedPlan:
    """A layout that fits, with what it takes."""
    return PricedPlan(
        model=space.model,
        cluster=space.cluster,
        stack=space.stack,
        layout=layout,
        time=time,
        memory=step_memory(space.model, layout, space.stack),
        limit=space.limit,
    )


def refused(space: LayoutSpace, layout: Layout) -> RefusedPlan:
    """A layout that does not fit, with what it would take."""
    memory = step_memory(space.model, layout, space.stack)
    return RefusedPlan(layout=layout, memory=memory, limit=space.limit)


def _why_no_layout(space: LayoutSpace) -> str:
    model, cluster, limits = space.model, space.cluster, space.limits
    sentence = (
        f"no plan divides {cluster.num_devices} devices, {model.layers} blocks, {model.heads} "
        f"heads and a global batch of {limits.global_batch}"
        + (f" with {dict(limits.fixed)}" if limits.fixed else "")
        + ": change the batch or the fixed axes"
        + (", or look at tp, cp and ep with axes='all'" if limits.plans_only else "")
    )
    if cluster.host is None or limits.offload == "none":
        return sentence
    roomy = space.on(replace(cluster, host=replace(cluster.host, memory=MOST_BYTES)))
    needs = [
        host_bytes(model, family.base.pp, choice.shard) * cluster.devices_per_host
        for family in roomy.families()
        for choice in family.shards
    ]
    if needs:
        return (
            f"offload is {limits.offload!r}, for which a host would keep "
            f"{min(needs) / 2**30:.1f} GiB or more, and it has {cluster.host.memory / 2**30:.1f} "
            "GiB: take more hosts, or do not offload"
        )
    return (
        f"{sentence}. What is offloaded are shards: shard is more than 1, tp, cp and ep are 1, "
        "'all' takes no pipeline, and a model whose head is its embedding takes none either"
    )


def fitting_cluster(space: LayoutSpace) -> Cluster | None:
    """The cluster with 2, 4, 8, ... times as many hosts on which a plan fits; None if none does."""
    memory, cluster, times = MemoryTable(space.model, space.stack), space.cluster, 2
    while times <= _MOST_TIMES and cluster.num_devices * times <= MOST_DEVICES:
        larger = replace(cluster, hosts=cluster.hosts * times)
        if any(min(memory.peaks(each)) <= space.limit for each in space.on(larger).families()):
            return larger
        times *= 2
    return None


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
        for choice, peak in zip(family.choices(), memory.peaks(family), strict=True):
            if peak > limit:
                continue
            layout = family.layout(*choice)
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
