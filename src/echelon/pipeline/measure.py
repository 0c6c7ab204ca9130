"""Measures when the actions of a pipeline ran and what they cost, by the executor's events."""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Self, final

from echelon import events
from echelon.checks import integer
from echelon.errors import ArgumentError, StateError
from echelon.page import TextTable, View, ViewPart, html_of, view_of
from echelon.pipeline.schedules.dataflow import FLOWS
from echelon.pipeline.schedules.ir import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    WEIGHT,
    Action,
    Kind,
    Schedule,
    parse_item,
)
from echelon.pipeline.schedules.render import Drawn, drawn_of, title_of
from echelon.pipeline.schedules.schedule_views import ranks_part, timelines_part, totals_part
from echelon.pipeline.schedules.simulate import Simulation, Step, Timeline, simulate

if TYPE_CHECKING:
    from echelon.comm.group import Group

_TEXT_CELLS = 120  # of the longest timeline as text
_MAX_STEPS = 50  # only the last steps are kept, since a block may contain a whole training


class _Run(NamedTuple):
    """One computation: when its inputs had arrived, when it ended, how long it waited before."""

    text: str
    start_s: float
    end_s: float
    waited_s: float


@final
class Measurement:
    """Times the steps of a pipeline while its block runs; afterwards every rank knows all of them.

    All ranks of the group enter and leave the block: its end is a collective. When the body raises,
    nothing is collected. Times of ranks on several hosts are comparable as far as their clocks are.

    Args:
        schedule: the schedule of the pipeline.
        group: the ranks of the pipeline.

    Example:
        >>> # with pipe.measure() as measured:
        >>> #     pipe.step(x, target=y)
        >>> # page = ec.pipeline.to_page(measured)
    """

    _repr_html_ = html_of

    def __init__(self, schedule: Schedule, group: Group) -> None:
        self._schedule, self._group = schedule, group
        self._rank = group.ranks[group.rank]
        length = sum(len(item.parts) for item in schedule.orders[group.rank])
        self._local: deque[_Run] = deque(maxlen=_MAX_STEPS * length)
        self._by_rank: list[list[_Run]] | None = None
        self._lock = threading.Lock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(events.listen(self._hear))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.close()
        if error is None:
            by_rank = self._group.all_gather_object([tuple(run) for run in self._local])
            self._by_rank = [[_Run(*run) for run in runs] for runs in by_rank]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in the job that the ranks of the timeline are."""
        return tuple(self._group.ranks)

    def _hear(self, event: events.Event) -> None:
        facts = event.facts
        if event.name != "pipeline.action" or facts["rank"] != self._rank or not facts["training"]:
            return
        if facts["kind"] not in COMPUTE:
            return
        end_s, waited_s = event.start_s + event.seconds, facts["waited_s"]
        with self._lock:
            self._local.append(_Run(facts["action"], event.start_s + waited_s, end_s, waited_s))

    def _last_step(self) -> list[list[_Run]]:
        """The computations of the last step, by rank."""
        if self._by_rank is None:
            raise StateError("nothing was measured yet: leave the block of the measurement first")
        last_step = []
        for runs, order in zip(self._by_rank, self._schedule.orders, strict=True):
            length = sum(len(item.parts) for item in order)
            if len(runs) < length:
                raise StateError("no step of the pipeline ran in the block of the measurement")
            last_step.append(runs[len(runs) - length :])
        return last_step

    @property
    def timeline(self) -> Timeline:
        """The last step in the block, in seconds; a computation begins when it has its inputs."""
        return Timeline.of(self._schedule.num_ranks, _steps(self._last_step()))

    @property
    def waited_s(self) -> list[float]:
        """How long each rank waited for values of other ranks in the last step."""
        return [sum(run.waited_s for run in runs) for runs in self._last_step()]

    @property
    def costs(self) -> dict[str, float | list[float]]:
        """Costs for ``simulate``: medians of the computations of the last 50 steps."""
        self._last_step()
        steps = _steps(self._by_rank or [])
        return {**measured_costs(steps, self._schedule.num_stages), "hop": self._hop_s()}

    def _hop_s(self) -> float:
        """The median time from the end of a computation to the start of one that waited for it."""
        last_step = self._last_step()
        ends = {run.text: run.end_s for runs in last_step for run in runs}
        placement = self._schedule.placement
        delays = []
        for rank, runs in enumerate(last_step):
            for run in runs:
                ended_s = max(
                    (
                        ends[str(source)]
                        for source in _sources(run.text, len(placement))
                        if str(source) in ends and placement[source.stage] != rank
                    ),
                    default=None,
                )
                if ended_s is not None and run.start_s - run.waited_s < ended_s < run.start_s:
                    delays.append(run.start_s - ended_s)
        return statistics.median(delays) if delays else 0.0

    @property
    def simulation(self) -> Simulation:
        """The schedule simulated with the measured costs."""
        return simulate(self._schedule, self.costs)


@drawn_of.register
def _(what: Measurement) -> Drawn:
    simulation, timeline = what.simulation, what.timeline
    return Drawn(
        timelines={"simulated": simulation.timeline, "measured": timeline},
        simulation=simulation,
        unit="s",
        cell=max(simulation.makespan, timeline.makespan) / _TEXT_CELLS or None,
    )


@view_of.register
def _(shown: Measurement) -> View:
    drawn = drawn_of(shown)
    assert drawn.simulation is not None, "a measurement has simulated costs"
    waited = [[str(rank), f"{seconds:.4g} s"] for rank, seconds in enumerate(shown.waited_s)]
    table = TextTable(heads=["rank", "waited for other ranks"], rows=waited)
    parts = [timelines_part(drawn), totals_part(drawn)]
    parts += [ranks_part(drawn.simulation, shown.timeline), ViewPart(title="Waits", content=table)]
    return View(title=f"Measured: {title_of(drawn.simulation.schedule)}", parts=parts)


def _steps(by_rank: list[list[_Run]]) -> list[Step]:
    return [
        Step(rank, parse_item(run.text), run.start_s, run.end_s)
        for rank, runs in enumerate(by_rank)
        for run in runs
    ]


def _sources(text: str, num_stages: int) -> list[Action]:
    """The computations of other stages whose result this one needs; only one of them runs."""
    item = parse_item(text)
    assert isinstance(item, Action)
    kind, i, stage = item
    source = FLOWS[kind].source(stage) if kind in FLOWS else -1
    if not 0 <= source < num_stages:
        return []
    return [Action(kind=made_by, microbatch=i, stage=source) for made_by in FLOWS[kind].made_by]


def measured_costs(steps: Iterable[Step], num_stages: int) -> dict[str, list[float]]:
    """Medians of the times of computations, by kind and stage.

    If a stage ran no whole backward, B is I + W; if it ran no halves, they are half of B.

    Example:
        >>> from echelon.pipeline.schedules.ir import parse_item
        >>> runs = [("0F0", 0, 1), ("0F1", 1, 4), ("0F2", 4, 6), ("0B0", 6, 10)]
        >>> measured_costs([Step(0, parse_item(t), s, e) for t, s, e in runs], num_stages=1)
        {'F': [2], 'B': [4], 'I': [2.0], 'W': [2.0]}
    """
    integer("num_stages", num_stages, 1)
    steps = list(steps) if isinstance(steps, Iterable) else [steps]
    if not all(isinstance(step, Step) for step in steps):
        raise ArgumentError(f"steps is {steps!r:.80}; give the steps of a timeline")
    took: dict[tuple[Kind, int], list[float]] = {}
    for step in steps:
        for part in step.item.parts:
            took.setdefault((part.kind, part.stage), []).append(step.end - step.start)
    medians = {key: statistics.median(times) for key, times in took.items()}
    costs: dict[str, list[float]] = {"F": [], "B": [], "I": [], "W": []}
    for stage in range(num_stages):
        forward, whole, inputs, weights = (
            medians.get((kind, stage)) for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)
        )
        if whole is None:
            whole = (inputs or 0.0) + (weights or 0.0)
        costs["F"].append(forward or 0.0)
        costs["B"].append(whole)
        costs["I"].append(whole / 2 if inputs is None else inputs)
        costs["W"].append(whole / 2 if weights is None else weights)
    return costs
