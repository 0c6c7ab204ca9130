"""Simulates a schedule: when each computation runs, why ranks idle, and how much memory is used.

``Timeline`` also holds measured steps, so both can be compared and drawn alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from echelon.checks import instance, integers
from echelon.errors import ArgumentError
from echelon.page import html_of
from echelon.pipeline.schedules.check import placed_and_complete
from echelon.pipeline.schedules.costs import Costs, CostsByName, read_costs
from echelon.pipeline.schedules.dataflow import KEPT, Transfer, Values, crossings
from echelon.pipeline.schedules.ir import (
    WHOLE_STAGE,
    Item,
    Kind,
    Schedule,
    check_type,
)
from echelon.pipeline.schedules.walk import Channel, walk


class Step(NamedTuple):
    """One computation as it ran.

    Attributes:
        rank: the rank that ran it.
        item: an action, or a pair.
        start: in seconds, or in the unit of the costs.
        end: in the same unit.
    """

    rank: int
    item: Item
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The steps of all ranks.

    Attributes:
        num_ranks: the number of ranks, also of those without a step.
        steps: in the order in which they begin on each rank.
    """

    num_ranks: int
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, num_ranks: int, steps: Iterable[Step]) -> Timeline:
        """A timeline of steps in any order, with the first of them at time 0.

        Example:
            >>> from echelon.pipeline.schedules.ir import parse_item
            >>> forward, backward = parse_item("0F0"), parse_item("0B0")
            >>> timeline = Timeline.of(1, [Step(0, backward, 7.5, 9), Step(0, forward, 7, 7.5)])
            >>> [(str(step.item), step.start, step.end) for step in timeline.steps]
            [('0F0', 0.0, 0.5), ('0B0', 0.5, 2.0)]
        """
        ordered = sorted(steps, key=lambda step: (step.start, step.end))
        zero = ordered[0].start if ordered else 0.0
        return cls(
            num_ranks,
            tuple(
                step._replace(start=float(step.start - zero), end=float(step.end - zero))
                for step in ordered
            ),
        )

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        if not self.steps:
            return 0.0
        return max(step.end for step in self.steps) - min(step.start for step in self.steps)

    _repr_html_ = html_of

    def __repr__(self) -> str:
        return (
            f"<Timeline: {self.num_ranks} ranks, {len(self.steps)} steps, "
            f"makespan {self.makespan:.6g}>"
        )

    def of_rank(self, rank: int) -> list[Step]:
        """The steps of one rank."""
        return [step for step in self.steps if step.rank == rank]


@dataclass(kw_only=True)
class Idle:
    """Why a rank had nothing to run, in the unit of the costs.

    Attributes:
        warm_up: time before its first computation.
        steady: time between two of its computations.
        drain: time after its last computation.
        messages: the part of ``warm_up`` and ``steady`` in which the awaited value was in transit.
        waiting_on: ``steady`` by the rank that computed the awaited value.
    """

    warm_up: float = 0.0
    steady: float = 0.0
    drain: float = 0.0
    messages: float = 0.0
    waiting_on: dict[int, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All idle time."""
        return self.warm_up + self.steady + self.drain


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The simulated run of a schedule.

    Attributes:
        schedule: the schedule that was simulated.
        timeline: when each computation runs.
        busy: time in computations, by rank.
        idle: the rest of the makespan by cause, by rank.
        peak: most activations alive at once, by rank, in activations of one microbatch over the
            rank's whole share.
        peak_nbytes: the same in bytes, by rank; None unless bytes were given.
    """

    schedule: Schedule
    timeline: Timeline
    busy: tuple[float, ...]
    idle: tuple[Idle, ...]
    peak: tuple[float, ...]
    peak_nbytes: tuple[int, ...] | None

    _repr_html_ = html_of

    def __repr__(self) -> str:
        return (
            f"<Simulation of {self.schedule!r}: makespan {self.makespan:.6g}, "
            f"bubble {self.span_bubble:.2%} (own {self.own_bubble:.2%}), "
            f"peak {max(self.peak, default=0):g}>"
        )

    @property
    def makespan(self) -> float:
        """From the first start to the last end, over all ranks."""
        return self.timeline.makespan

    @property
    def span_bubble(self) -> float:
        """Idle time over time, from the first start to the last end of all ranks.

        What a step costs where the optimizer waits for all ranks, as it does to clip gradients by
        their norm.
        """
        if not self.makespan:
            return 0.0
        return 1 - sum(self.busy) / (self.schedule.num_ranks * self.makespan)

    @property
    def own_bubble(self) -> float:
        """Idle time over time, of the longest time from a rank's own first start to its last end.

        What a step costs where each rank steps its optimizer alone.
        """
        longest = max((self.makespan - i.warm_up - i.drain for i in self.idle), default=0.0)
        return 1 - sum(self.busy) / (self.schedule.num_ranks * longest) if longest else 0.0


def simulate(
    schedule: Schedule,
    costs: CostsByName | None = None,
    *,
    stage_nbytes: Sequence[int] | int | None = None,
    channel: Channel = Channel.IDEAL,
) -> Simulation:
    """Simulate a schedule: each rank runs in its order, and each value arrives after a hop.

    Args:
        schedule: computations only, or lowered.
        costs: of one microbatch in one stage: ``F``, ``B``, ``I``, ``W``, ``F&B``, each a number or
            a list by stage, and ``hop``. A stage is 1/v of a rank's share where a rank holds v.
        stage_nbytes: activations of one microbatch, for each stage or by stage.
        channel: which transfers wait for one another; other than ideal needs a lowered schedule.

    Returns:
        its times are in the unit of the costs.

    Raises:
        ArgumentError: the costs are wrong, or a channel is given and the schedule has no transfers.
        ScheduleError: the schedule lacks an action or stalls.

    Example:
        >>> from echelon.pipeline.schedules.looped import one_f_one_b
        >>> simulation = simulate(one_f_one_b(4, 8), costs={"F": 1, "B": 2})
        >>> simulation.makespan, simulation.peak
        (33.0, (4.0, 3.0, 2.0, 1.0))
        >>> round(simulation.span_bubble, 3)  # (p-1)/(m+p-1)
        0.273
    """
    check_type(schedule)
    instance("channel", channel, Channel)
    crosses = any(crossings(schedule.placement))
    if channel is not Channel.IDEAL and crosses and not schedule.is_lowered:
        raise ArgumentError(
            f"{channel.name} orders transfers and this schedule has none; lower it first "
            "(echelon.pipeline.lower)"
        )
    placed_and_complete(schedule)
    clock = _Clock(schedule, read_costs(costs, schedule.num_stages), channel)
    nbytes = _stage_nbytes(stage_nbytes, schedule.num_stages)
    return Simulation(
        schedule=schedule,
        timeline=clock.timeline(),
        busy=tuple(clock.busy),
        idle=tuple(clock.idle),
        peak=tuple(
            _most_alive(schedule, rank, [1] * schedule.num_stages)
            / max(1, len(schedule.stages_of(rank)))
            for rank in range(schedule.num_ranks)
        ),
        peak_nbytes=None
        if nbytes is None
        else tuple(_most_alive(schedule, rank, nbytes) for rank in range(schedule.num_ranks)),
    )


class _Clock:
    """The time of each rank while a walk goes through the schedule."""

    def __init__(self, schedule: Schedule, costs: Costs, channel: Channel) -> None:
        self._schedule, self._costs, self._channel = schedule, costs, channel
        values, size = Values(schedule.num_stages, schedule.num_microbatches), schedule.num_ranks
        self._needs, self._gives = values.by_stage(range(schedule.num_stages))
        self._owners = values.owners(schedule.placement)
        self._now: list[float | None] = [None] * size  # end of the last computation
        self._computed = [0.0] * values.count  # when a value was computed
        self._arrival = [0.0] * values.count  # when it arrived on the other rank
        self._posted: dict[Transfer, float] = {}
        self._free: dict[object, float] = {}  # when a channel has ended its last transfer
        self.busy = [0.0] * size
        self.idle = [Idle() for _ in range(size)]

    def timeline(self) -> Timeline:
        """Walk, and time every computation."""
        steps = []
        for rank, _, item, transfer in walk(self._schedule, self._channel):
            if transfer is None:
                if item.kind not in WHOLE_STAGE:
                    steps.append(self._compute(rank, item))
            elif item.kind in (Kind.RECV_F, Kind.RECV_B):
                self._posted[transfer] = self._now[rank] or 0.0
            else:
                self._transfer(transfer)
        timeline = Timeline.of(self._schedule.num_ranks, steps)
        start = min((step.start for step in steps), default=0.0)
        end = max((step.end for step in steps), default=0.0)
        for now, idle in zip(self._now, self.idle, strict=True):
            idle.warm_up -= 0.0 if now is None else start
            idle.drain = end - (start if now is None else now)
        return timeline

    def _compute(self, rank: int, item: Item) -> Step:
        before = self._now[rank]
        ready, source, computed = 0.0, rank, 0.0
        for kind, i, stage in item.parts:
            for first in self._needs[kind][stage]:
                value = first + (i or 0)
                owner = self._owners[value]
                arrival = self._computed[value] if owner == rank else self._arrive(value)
                if arrival > ready:
                    ready, source, computed = arrival, owner, self._computed[value]
        start = max(ready, before or 0.0)
        self._account(rank, before, start, source, computed)
        seconds = self._costs.of(item)
        self._now[rank] = end = start + seconds
        self.busy[rank] += seconds
        for kind, i, stage in item.parts:
            for first in self._gives[kind][stage]:
                self._computed[first + (i or 0)] = end
        return Step(rank, item, start, end)

    def _account(
        self, rank: int, before: float | None, start: float, source: int, computed: float
    ) -> None:
        """Add up why the rank was idle until ``start``."""
        idle, since = self.idle[rank], before or 0.0
        if start <= since:
            return
        idle.messages += start - max(since, computed)
        if before is None:
            idle.warm_up += start
        else:
            idle.steady += start - since
            idle.waiting_on[source] = idle.waiting_on.get(source, 0.0) + start - since

    def _arrive(self, value: int) -> float:
        """When a value of another rank arrives."""
        if self._schedule.is_lowered:
            return self._arrival[value]
        return self._computed[value] + self._costs.hop

    def _transfer(self, transfer: Transfer) -> None:
        """Time a transfer that both ends have posted, after all others on its channels."""
        channels: list[object] = []
        if self._channel is Channel.PAIR:
            channels = [transfer.pair()]
        elif self._channel is Channel.RANK:
            channels = [transfer.src, transfer.dst]
        begin = max(
            self._computed[transfer.value],
            self._posted.pop(transfer),
            *(self._free.get(channel, 0.0) for channel in channels),
        )
        end = begin + self._costs.hop
        self._free.update(dict.fromkeys(channels, end))
        self._arrival[transfer.value] = end


def _most_alive(schedule: Schedule, rank: int, sizes: Sequence[int]) -> int:
    """The largest sum of activations alive on a rank, each counted by the size of its stage."""
    if not schedule.has_backward:  # forwards keep nothing then
        return 0
    alive = most = 0
    for item in schedule.orders[rank]:
        for part in item.parts:
            change = KEPT.get(part.kind)
            if change is not None:
                alive += change * sizes[part.stage]
                most = max(most, alive)
    return most


def _stage_nbytes(nbytes: Sequence[int] | int | None, num_stages: int) -> Sequence[int] | None:
    if nbytes is None:
        return None
    sizes = integers("stage_nbytes", nbytes if isinstance(nbytes, Sequence) else [nbytes])
    sizes = sizes if isinstance(nbytes, Sequence) else sizes * num_stages
    if len(sizes) != num_stages:
        raise ArgumentError(
            f"stage_nbytes is {nbytes!r:.80}; give a number >= 0, or one for each of the "
            f"{num_stages} stages"
        )
    return sizes
