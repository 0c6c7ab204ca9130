"""Which rank holds up the others, by how much in each step, and in what. Pure.

Ranks that communicate take as long as the slowest of them. So what a rank costs the others is how
much longer than they it is busy with the same activity, as far as somebody waits meanwhile. This
needs no common clock, since every rank measures durations of its own. Three rules keep chance out:

- Waits in communication and waits for a processor are not counted.
- The cost is the median over steps, of the difference to the median of the other ranks, and most
  steps must show at least half of it. What happens in some steps only, such as a save, is averaged
  over all of them instead, and must have happened several times.
- It is at least ``SHARE`` of a step, and ``LEAST_S``.

[Note: a busy machine]
A rank that is kept from a processor by others also computes more slowly, since it finds the caches
full of their data: under a load of 8 it took up to 1.8 times the processor time of the other ranks,
step after step. So what it computes longer shows a cost only as far as it exceeds the time for
which the rank had no processor, or ``FACTOR`` times what the others take. For what it is blocked
longer, there is no such excuse.

[Note: stages differ]
Stages of a pipeline need not be equal in layers, in parameters, and in the messages that their
place demands. So a rank with stages is not compared by how long its forward, its backward and its
optimizer take, but by how long it is blocked in them, which no stage is by design. It is also named
if its backward takes ``FACTOR`` times as long as those of the others, measured by the forward of
each (or the reverse).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple, TypeVar, final

from echelon.diagnosis.step_rows import Activity, RankSteps, StepTimes

_Item = TypeVar("_Item")

SHARE = 0.05
LEAST_S = 0.001
FEWEST_STEPS = 4
FACTOR = 2.5  # more than what a busy machine, or the kinds of layers of a stage, account for
_MOST_SHOW = 0.75  # the share of steps that must show half of the cost
_RARE = (Activity.LOADING, Activity.SAVING, Activity.COLLECTING)  # may happen in some steps only
_FEWEST_TIMES = 3
# About what a fault takes: the kernel clears a page, or reads it from a disk. Faults that explain
# this share of the cost, or more, are named.
_MINOR_NS, _MAJOR_NS, _FAULTS_SHARE = 1_000, 50_000, 0.1
_NOT_COUNTED = (Activity.COMMUNICATION, Activity.PROCESSOR)
_PASSES = (Activity.FORWARD, Activity.BACKWARD)
_WORK_OF_STAGES = (*_PASSES, Activity.OPTIMIZER)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HeldUp:
    """A rank that holds up the others.

    Attributes:
        rank: in the job.
        activity: in which it takes longer than they.
        seconds: by how much, in each step, as far as another rank waits so long.
        step_s: how long a step takes.
        num_steps: that the numbers come from.
        faults: page faults that it has more than the others in each step; 0 where they are too few
            to explain the cost.
    """

    rank: int
    activity: Activity
    seconds: float
    step_s: float
    num_steps: int
    faults: int = 0

    def __str__(self) -> str:
        faults = f", with {self.faults:,} page faults more than others" if self.faults else ""
        return (
            f"rank {self.rank} cost {1e3 * self.seconds:,.0f} ms a step, {self.activity.text}"
            f"{faults} (a step took {1e3 * self.step_s:,.0f} ms)"
        )


def verdict(ranks: Sequence[RankSteps]) -> list[HeldUp]:
    """The ranks that hold up the others, the most expensive first; empty where none stands out.

    Args:
        ranks: what all ranks did, or those of one host.
    """
    shared = set.intersection(*(set(steps.steps) for steps in ranks)) - {0} if ranks else set()
    if len(ranks) < 2 or len(shared) < FEWEST_STEPS:
        return []
    judge = _Judge(ranks, sorted(shared))
    named = (judge.judge(r, activity) for r in range(len(ranks)) for activity in Activity)
    costs = [cost for cost in named if cost is not None]
    return sorted(costs, key=lambda cost: -cost.seconds)


class _Excess(NamedTuple):
    """By how much longer than the others a rank was busy with an activity in one step.

    Attributes:
        ns: all of it.
        sure_ns: what a busy machine does not explain; see [Note: a busy machine].
    """

    ns: float
    sure_ns: float


@final
class _Judge:
    """Compares ranks over the steps that all of them have kept."""

    def __init__(self, ranks: Sequence[RankSteps], numbers: Sequence[int]) -> None:
        self._ranks = ranks
        self._rows = [[steps.steps[number] for number in numbers] for steps in ranks]
        self._step_ns = median(row.wall_ns for rows in self._rows for row in rows)
        self._least_ns = max(SHARE * self._step_ns, 1e9 * LEAST_S)
        self._stages = any(steps.is_stage for steps in ranks)

    def judge(self, r: int, activity: Activity) -> HeldUp | None:
        """Whether a rank holds up the others in an activity."""
        if activity in _NOT_COUNTED:
            return None
        cost_ns = min(self._steady_ns(r, activity), self._longest_wait_ns(r))
        if activity in _RARE:
            cost_ns = max(cost_ns, self._rare_ns(r, activity))
        if cost_ns < self._least_ns:
            return None
        return HeldUp(
            rank=self._ranks[r].rank,
            activity=activity,
            seconds=cost_ns / 1e9,
            step_s=self._step_ns / 1e9,
            num_steps=len(self._rows[r]),
            faults=self._faults(r, cost_ns),
        )

    def _steady_ns(self, r: int, activity: Activity) -> float:
        """By how much the rank is slower in most of the steps."""
        excesses = self._excesses(r, activity)
        cost = median(excess.ns for excess in excesses)
        shown = sum(excess.sure_ns >= cost / 2 for excess in excesses)
        return cost if shown >= _MOST_SHOW * len(excesses) else 0.0

    def _rare_ns(self, r: int, activity: Activity) -> float:
        """By how much the rank is slower on average, if it has been so several times."""
        times = sum(excess.sure_ns > self._least_ns for excess in self._excesses(r, activity))
        if times < _FEWEST_TIMES:
            return 0.0
        means = [self._mean_ns(steps, activity) for steps in self._ranks]
        waits = [self._mean_ns(steps, Activity.COMMUNICATION) for steps in self._ranks]
        return min(means[r] - median(_others(means, r)), max(_others(waits, r)))

    def _mean_ns(self, steps: RankSteps, activity: Activity) -> float:
        return steps.totals.spans_ns[activity] / max(1, steps.num_steps - 1)

    def _excesses(self, r: int, activity: Activity) -> list[_Excess]:
        """By how much longer than the others the rank was busy with the activity, by step."""
        return [
            self._excess(r, activity, [rows[i] for rows in self._rows])
            for i in range(len(self._rows[r]))
        ]

    def _excess(self, r: int, activity: Activity, rows: Sequence[StepTimes]) -> _Excess:
        span, usual_ns = rows[r].spans_ns[activity], self._usual_ns(r, activity, rows)
        blocked = [row.blocked_ns[activity] for row in rows]
        more, more_blocked = span - usual_ns, blocked[r] - median(_others(blocked, r))
        if self._stages and activity in _WORK_OF_STAGES:
            if activity not in _PASSES or span <= FACTOR * usual_ns:
                return _Excess(more_blocked, more_blocked)
            more = max(more, more_blocked)
        by_machine = min(rows[r].spans_ns[Activity.PROCESSOR], (FACTOR - 1) * usual_ns)
        return _Excess(more, max(more_blocked, more - by_machine))

    def _usual_ns(self, r: int, activity: Activity, rows: Sequence[StepTimes]) -> float:
        """How long the others are busy with the activity: for a pass of a stage, in proportion."""
        if not self._stages or activity not in _PASSES:
            return median(row.spans_ns[activity] for row in _others(rows, r))
        (other_pass,) = set(_PASSES) - {activity}
        ratios = [row.spans_ns[activity] / max(1, row.spans_ns[other_pass]) for row in rows]
        return median(_others(ratios, r)) * rows[r].spans_ns[other_pass]

    def _faults(self, r: int, cost_ns: float) -> int:
        """How many page faults the rank has more than the others, if they explain its cost."""
        minor = [median(row.minor_faults for row in rows) for rows in self._rows]
        major = [median(row.major_faults for row in rows) for rows in self._rows]
        more_minor = minor[r] - median(_others(minor, r))
        more_major = major[r] - median(_others(major, r))
        explained_ns = _MINOR_NS * more_minor + _MAJOR_NS * more_major
        return round(more_minor + more_major) if explained_ns > _FAULTS_SHARE * cost_ns else 0

    def _longest_wait_ns(self, r: int) -> float:
        """The wait in communication of the rank that waits the most, beside this one."""
        return max(
            median(row.spans_ns[Activity.COMMUNICATION] for row in rows)
            for rows in _others(self._rows, r)
        )


def _others(items: Sequence[_Item], r: int) -> list[_Item]:
    return [item for i, item in enumerate(items) if i != r]
