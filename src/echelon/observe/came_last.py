"""Which rank came last in collectives, by how much, and what it had done before.

A rank that is late once is late in each asynchronous call that follows, until it waits. So what
counts is by how much the lateness of a rank grew since the group's call before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import final

from echelon import checks
from echelon.comm.world import World
from echelon.diagnosis.arrivals import Arrival, arrivals_of
from echelon.diagnosis.step_rows import Activity

_MOST_SHOWN = 20


@final
@dataclass(slots=True)
class Lateness:
    """How often a rank came last, and what that added up to.

    Attributes:
        calls: the number of collectives in which it came last.
        seconds: by how much its lateness, against the first rank to come, grew in them.
    """

    calls: int = 0
    seconds: float = 0.0


@final
@dataclass(slots=True)
class CallLateness:
    """Who came last in the collectives of one line of the program.

    Attributes:
        group: its name.
        call: what it is, and where it is made.
        growths: by how much the lateness of the rank that came last had grown, in seconds.
        last: how often each rank came last, and what it had done before.
    """

    group: str
    call: str
    growths: list[float] = field(default_factory=list)
    last: Counter[tuple[int, Activity]] = field(default_factory=Counter)

    def __str__(self) -> str:
        (rank, activity), times = self.last.most_common(1)[0]
        return (
            f"rank {rank} came last in {times:,} of {len(self.growths):,}, after what it did "
            f"{activity.text}; median {1e3 * median(self.growths):,.1f} ms: {self.call} "
            f"of group {self.group!r}"
        )


@final
@dataclass(frozen=True, slots=True)
class CameLast:
    """Who came last in the last collectives.

    Attributes:
        ranks: the total of each rank, in rank order.
        calls: by line of the program, those first that cost the most.
        waited_s: for each rank, in rank order, by how many seconds it was there before each rank
            that came last.
    """

    ranks: Sequence[Lateness]
    calls: Sequence[CallLateness]
    waited_s: Sequence[Sequence[float]] = ()

    def __str__(self) -> str:
        totals = [
            f"rank {rank} came last in {total.calls:,} collectives, and in them fell back by "
            f"{1e3 * total.seconds:,.0f} ms"
            for rank, total in enumerate(self.ranks)
        ]
        return "\n".join([*totals, *map(str, self.calls[:_MOST_SHOWN])])


def compare_arrivals(ranks: Mapping[int, Iterable[Arrival]]) -> CameLast:
    """Who came last, from the arrivals of ranks that have one clock."""
    meetings: dict[tuple[str, int], dict[int, Arrival]] = {}
    for rank, arrivals in ranks.items():
        for arrival in arrivals:
            meetings.setdefault((arrival.group, arrival.position), {})[rank] = arrival
    totals = {rank: Lateness() for rank in ranks}
    waited = {rank: dict.fromkeys(ranks, 0.0) for rank in ranks}
    calls: dict[tuple[str, str], CallLateness] = {}
    before: dict[tuple[str, int], float] = {}  # the lateness of each rank in each group
    for (group, _), meeting in sorted(meetings.items(), key=_begin):
        if len(meeting) < 2:
            continue
        first = min(arrival.time_ns for arrival in meeting.values())
        late = {rank: (arrival.time_ns - first) / 1e9 for rank, arrival in meeting.items()}
        last = max(late, key=late.__getitem__)
        growth = max(0.0, late[last] - before.get((group, last), 0.0))
        totals[last].calls += 1
        totals[last].seconds += growth
        arrival = meeting[last]
        key = group, arrival.call
        calls.setdefault(key, CallLateness(*key)).growths.append(growth)
        calls[key].last[last, arrival.activity] += 1
        for rank in late:
            gap, gap_before = (
                lateness.get(last, 0.0) - lateness.get(rank, 0.0)
                for lateness in (late, {r: before.get((group, r), 0.0) for r in late})
            )
            waited[rank][last] += max(0.0, gap - max(0.0, gap_before))
        before |= {(group, rank): seconds for rank, seconds in late.items()}
    return CameLast(
        [totals[rank] for rank in sorted(totals)],
        sorted(calls.values(), key=lambda call: -sum(call.growths)),
        [[waited[rank][last] for last in sorted(ranks)] for rank in sorted(ranks)],
    )


def _begin(item: tuple[tuple[str, int], Mapping[int, Arrival]]) -> int:
    return min(arrival.time_ns for arrival in item[1].values())


def came_last(world: World) -> CameLast:
    """Who came last in the last 4,096 collectives of each rank, and what it had done before.

    All ranks call it, and all get the same. They must be of one host, because clocks of hosts
    differ. Messages are not counted: a stage waits for them by design.

    Example:
        >>> # print(came_last(world).calls[0])
    """
    checks.instance("world", world, World)
    records = world.group.all_gather_object(world.steps.time.arrivals.record())
    return compare_arrivals({rank: arrivals_of(record) for rank, record in enumerate(records)})
