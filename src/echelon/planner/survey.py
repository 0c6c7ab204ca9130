"""``Survey``: what a look at every layout says besides which are fastest."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, final

from echelon.planner.cluster import Cluster
from echelon.planner.layout import Layout
from echelon.planner.layout_space import LayoutFamily, SearchLimits, families
from echelon.planner.memory_table import MemoryTable
from echelon.planner.operations import PlannedModel
from echelon.planner.plan_search import PlannedLayout
from echelon.planner.refusal import RefusedPlan
from echelon.planner.simulated_step import simulated_steps, simulated_time
from echelon.planner.software_stack import SoftwareStack
from echelon.planner.step_memory import step_memory
from echelon.planner.step_time import LayoutTimer


@final
@dataclass(frozen=True, kw_only=True)
class Survey:
    """What there is besides the fastest layouts.

    Attributes:
        smallest: those that fit with the least memory, from the smallest on.
        pareto: those that fit of which none is both faster and smaller, from the fastest on.
        refused: of each combination of axes and sharding of which nothing fits, the layout that
            needs least; from the nearest on.
    """

    smallest: tuple[PlannedLayout, ...]
    pareto: tuple[PlannedLayout, ...]
    refused: tuple[RefusedPlan, ...]


class _Sized(NamedTuple):
    peak: float
    layout: Layout


def survey(
    model: PlannedModel,
    cluster: Cluster,
    stack: SoftwareStack,
    limits: SearchLimits,
    limit: float,
    best: Iterable[PlannedLayout] = (),
) -> Survey:
    """Look at every layout of the space of ``search``.

    Args:
        limit: bytes that may be allocated on one device.
        best: what the search gave. Only layouts that are on the front by the closed form are
            simulated, and the fastest by simulation may be none of them.
    """
    timer, table = LayoutTimer(model, cluster, stack), MemoryTable(model, stack)
    front, smallest = Front(), list[_Sized]()
    refused, kinds = dict[tuple[object, ...], _Sized](), set[tuple[object, ...]]()
    for family in families(model, cluster, limits):
        bound = timer.least_seconds(family.base)
        for sized in _sized(family, table):
            layout = sized.layout
            kind = (layout.tp, layout.cp, layout.ep, layout.pp, layout.shard, layout.sharded)
            if sized.peak > limit:
                if kind not in refused or sized.peak < refused[kind].peak:
                    refused[kind] = sized
                continue
            kinds.add(kind)
            if len(smallest) < limits.keep or sized.peak < smallest[-1].peak:
                bisect.insort(smallest, sized, key=lambda kept: kept.peak)
                del smallest[limits.keep :]
            if not front.is_beaten(bound, sized.peak):
                _add_timed(front, timer, sized)

    nearest = sorted(
        (sized for kind, sized in refused.items() if kind not in kinds),
        key=lambda sized: sized.peak,
    )
    layouts = [sized.layout for sized in smallest] + [layout for _, _, layout in front.points]
    timed = simulated_steps(timer, [(layout, timer.step_time(layout)) for layout in layouts])
    planned = [
        PlannedLayout(
            layout=layout, time=time, memory=step_memory(model, layout, stack), limit=limit
        )
        for layout, time in timed
    ]
    return Survey(
        smallest=tuple(planned[: len(smallest)]),
        pareto=tuple(pareto_of([*best, *planned])),
        refused=tuple(
            RefusedPlan(
                layout=sized.layout, memory=step_memory(model, sized.layout, stack), limit=limit
            )
            for sized in nearest
        ),
    )


def pareto_of(planned: Iterable[PlannedLayout]) -> list[PlannedLayout]:
    """Those of which none is both faster and smaller, from the fastest on."""
    front: list[PlannedLayout] = []
    for candidate in sorted(planned, key=lambda plan: (_seconds(plan), plan.memory.total)):
        if not front or candidate.memory.total < front[-1].memory.total:
            front.append(candidate)
    return front


def _seconds(planned: PlannedLayout) -> float:
    return planned.time.total


class Front:
    """The points of which none has both less time and less memory, from the fastest on.

    Example:
        >>> front = Front()
        >>> for seconds, nbytes in ((2.0, 5), (1.0, 9), (3.0, 6), (1.5, 7), (2.0, 4)):
        ...     front.add(seconds, nbytes, Layout())
        >>> [(seconds, nbytes) for seconds, nbytes, _ in front.points]
        [(1.0, 9), (1.5, 7), (2.0, 4)]
    """

    def __init__(self) -> None:
        self.points = list[tuple[float, float, Layout]]()

    def is_beaten(self, seconds: float, nbytes: float) -> bool:
        """Whether a point has at most this time and at most this memory."""
        place = bisect.bisect_right(self.points, seconds, key=lambda point: point[0])
        return place > 0 and self.points[place - 1][1] <= nbytes

    def add(self, seconds: float, nbytes: float, layout: Layout) -> None:
        """Add a point, unless it is beaten, and remove those that it beats."""
        if self.is_beaten(seconds, nbytes):
            return
        place = bisect.bisect_left(self.points, seconds, key=lambda point: point[0])
        end = place
        while end < len(self.points) and self.points[end][1] >= nbytes:
            end += 1
        self.points[place:end] = [(seconds, nbytes, layout)]


def _add_timed(front: Front, timer: LayoutTimer, sized: _Sized) -> None:
    """Add a layout; one whose schedule has no closed form is simulated, if its bound is no worse
    than the front."""
    time = timer.step_time(sized.layout)
    if not sized.layout.has_closed_form:
        if front.is_beaten(time.total, sized.peak):
            return
        time = simulated_time(timer, sized.layout, time)
    front.add(time.total, sized.peak, sized.layout)


def _sized(family: LayoutFamily, table: MemoryTable) -> Iterator[_Sized]:
    for schedule, row in zip(family.schedules, table.peaks(family), strict=True):
        for shard, peak in zip(family.shards, row, strict=True):
            yield _Sized(peak, family.layout(schedule, shard))
