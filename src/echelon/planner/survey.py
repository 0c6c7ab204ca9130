"""``Survey``: what a look at every layout says besides which are fastest."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from operator import itemgetter
from typing import final

from echelon.planner.layout import Layout
from echelon.planner.layout_space import LayoutSpace
from echelon.planner.memory_table import MemoryTable
from echelon.planner.plan_search import priced, refused
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.refusal import RefusedPlan
from echelon.planner.simulated_step import simulated_time
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

    smallest: tuple[PricedPlan, ...]
    pareto: tuple[PricedPlan, ...]
    refused: tuple[RefusedPlan, ...]


def survey(space: LayoutSpace, best: Iterable[PricedPlan] = ()) -> Survey:
    """Look at every layout of the space of ``search``.

    Args:
        best: what the search gave. Only layouts that are on the front by the closed form are
            simulated, and the fastest by simulation may be none of them.
    """
    timer = LayoutTimer(space.model, space.cluster, space.stack)
    memory, limit, keep = MemoryTable(space.model, space.stack), space.limit, space.limits.keep
    front, smallest = Front(), list[tuple[float, Layout]]()
    above, kinds = dict[object, tuple[float, Layout]](), set[object]()
    for family in space.families():
        base, bound = family.base, timer.least_seconds(family.base)
        for choice, peak in zip(family.choices(), memory.peaks(family), strict=True):
            kind = (base.tp, base.cp, base.ep, base.pp, choice[1].shard, choice[1].sharded)
            if peak > limit:
                if kind not in above or peak < above[kind][0]:
                    above[kind] = peak, family.layout(*choice)
                continue
            kinds.add(kind)
            if len(smallest) < keep or peak < smallest[-1][0]:
                bisect.insort(smallest, (peak, family.layout(*choice)), key=itemgetter(0))
                del smallest[keep:]
            if not front.is_beaten(bound, peak):
                _add_timed(front, timer, family.layout(*choice), peak)
    nearest = [sized for kind, sized in above.items() if kind not in kinds]
    layouts = [layout for _, layout in smallest] + [layout for _, _, layout in front.points]
    plans = [
        priced(space, layout, simulated_time(timer, layout, timer.step_time(layout)))
        for layout in layouts
    ]
    return Survey(
        smallest=tuple(plans[: len(smallest)]),
        pareto=tuple(pareto_of([*best, *plans])),
        refused=tuple(refused(space, layout) for _, layout in sorted(nearest, key=itemgetter(0))),
    )


def pareto_of(plans: Iterable[PricedPlan]) -> list[PricedPlan]:
    """Those of which none is both faster and smaller, from the fastest on."""
    front: list[PricedPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.memory.total)):
        if not front or plan.memory.total < front[-1].memory.total:
            front.append(plan)
    return front


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


def _add_timed(front: Front, timer: LayoutTimer, layout: Layout, peak: float) -> None:
    """Add a layout; one whose schedule has no closed form is simulated, if its bound is no worse
    than the front."""
    time = timer.step_time(layout)
    if not layout.has_closed_form:
        if front.is_beaten(time.total, peak):
            return
        time = simulated_time(timer, layout, time)
    front.add(time.total, peak, layout)
