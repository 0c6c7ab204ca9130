"""Draws schedules, simulations and measured steps as text, as SVG and as a page of HTML.

The page is one file that loads no other. It shows a schedule as planned and as it ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import singledispatch
from html import escape
from typing import Any

from echelon import checks
from echelon.errors import ArgumentError
from echelon.page import page, section, table
from echelon.pipeline.schedules.ir import BACKWARD, FORWARD, INPUT, Item, Kind, Schedule
from echelon.pipeline.schedules.simulate import Simulation, Step, Timeline, simulate

MAX_ROW_CHARS = 4000  # longer rows of text are unreadable

# Geometry of the SVG, in pixels.
ROW, GAP, LEFT, TOP, RIGHT = 22, 4, 64, 26, 16

COLOURS = {"forward": "#4c78a8", "backward": "#e0803a", "inputs": "#eca82c", "weights": "#72a860"}
COLOURS |= {"pair": "#8a6fb0"}

_DRAWABLE = (
    "a Schedule, a Simulation, a Timeline, the measurement of pipe.measure(), or a dict of these "
    "by title"
)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What is drawn of an object.

    Attributes:
        timelines: by title, from top to bottom.
        simulation: as planned, for the numbers of a page; None where there is no plan.
        unit: the name of the unit of time; empty where it has none.
        cell: the time of one cell of text; None: the shortest step.
    """

    timelines: Mapping[str, Timeline]
    simulation: Simulation | None = None
    unit: str = ""
    cell: float | None = None


@singledispatch
def drawn_of(what: object) -> Drawn:
    """The timelines of a schedule, a simulation, a timeline, a measurement, or a dict of them.

    Raises:
        ArgumentError: it is none of these.
        ScheduleError: it is a schedule that cannot run.
    """
    raise ArgumentError(f"this is {what!r:.80}, which is not drawn here; give {_DRAWABLE}")


@drawn_of.register
def _(what: Schedule) -> Drawn:
    return drawn_of(simulate(what))  # with the costs F=1, B=2


@drawn_of.register
def _(what: Simulation) -> Drawn:
    return Drawn(timelines={"simulated": what.timeline}, simulation=what)


@drawn_of.register
def _(what: Timeline) -> Drawn:
    return Drawn(timelines={"timeline": what})


@drawn_of.register
def _(what: Mapping) -> Drawn:  # type: ignore[type-arg]
    timelines: dict[str, Timeline] = {}
    drawings = {str(title): drawn_of(value) for title, value in what.items()}
    for title, drawn in drawings.items():
        several = len(drawn.timelines) > 1
        for name, timeline in drawn.timelines.items():
            timelines[f"{title}, {name}" if several else title] = timeline
    units = {drawn.unit for drawn in drawings.values()}
    cells = [drawn.cell for drawn in drawings.values() if drawn.cell is not None]
    plans = [drawn.simulation for drawn in drawings.values() if drawn.simulation is not None]
    return Drawn(
        timelines=timelines,
        simulation=plans[0] if len(plans) == 1 else None,
        unit=units.pop() if len(units) == 1 else "",
        cell=min(cells, default=None),
    )


def to_text(what: Any, unit: float | None = None) -> str:
    """Grids: one row per rank, time to the right, a dot where a rank is idle.

    Args:
        what: a schedule, which is drawn with F=1 and B=2, a simulation, a timeline, the measurement
            of ``pipe.measure()``, or a dict of these by title.
        unit: how much time one cell is; the shortest step if None, and of a measurement a 120th of
            the longest timeline. A step takes at least one cell.

    Raises:
        ArgumentError: it is none of these, or the grid would be wider than 4000 characters; give a
            larger unit.
        ScheduleError: the schedule cannot run.

    Example:
        >>> from echelon.pipeline import schedule
        >>> print(to_text(schedule("1f1b", 2, 2, 2)))
        rank 0 | 0F0 0F1  .   .  0B0 ===  .  0B1 ===
        rank 1 |  .  1F0 1B0 === 1F1 1B1 ===  .   .
    """
    drawn = drawn_of(what)
    unit = drawn.cell if unit is None else checks.positive("unit", unit)
    if len(drawn.timelines) == 1:
        return _grid(next(iter(drawn.timelines.values())), unit)
    return "\n".join(
        f"{title}\n{_grid(timeline, unit)}" for title, timeline in drawn.timelines.items()
    )


def _grid(timeline: Timeline, unit: float | None) -> str:
    lengths = [step.end - step.start for step in timeline.steps if step.end > step.start]
    unit = min(lengths, default=1.0) if unit is None else unit
    if not unit > 0:
        raise ArgumentError(f"unit is {unit!r:.80}; give a time > 0")
    labels = max((len(str(step.item)) for step in timeline.steps), default=1)
    cells = round(timeline.makespan / unit)
    if cells * (labels + 1) > MAX_ROW_CHARS:
        raise ArgumentError(
            f"{cells} cells of {labels + 1} characters are too wide for text; draw an SVG, or give "
            f"a unit larger than {unit:g}"
        )
    name = len(str(timeline.num_ranks - 1))
    lines = []
    for rank in range(timeline.num_ranks):
        row: list[str] = []
        for step in timeline.of_rank(rank):
            begin = max(len(row), round(step.start / unit))
            row += ["."] * (begin - len(row))
            row.append(str(step.item))
            row += ["=" * labels] * (round(step.end / unit) - len(row))
        row += ["."] * (cells - len(row))
        text = " ".join(cell.center(labels) for cell in row)
        lines.append(f"rank {rank:>{name}} | {text}".rstrip())
    return "\n".join(lines)


def to_svg(what: Any, width: int = 1200) -> str:
    """A drawing of one or more timelines over each other, all on one scale of time.

    Each step has its text and its times as a tooltip.

    Args:
        what: as in ``to_text``.
        width: pixels.

    Raises:
        ArgumentError: it is nothing that can be drawn.
        ScheduleError: the schedule cannot run.

    Example:
        >>> from echelon.pipeline import schedule
        >>> to_svg(schedule("1f1b", 2, 2, 2)).count("<rect")
        8
    """
    checks.integer("width", width, 1)
    timelines = drawn_of(what).timelines
    longest = max((timeline.makespan for timeline in timelines.values()), default=0.0) or 1.0
    scale = (width - LEFT - RIGHT) / longest
    y, parts = 0, list[str]()
    for title, timeline in timelines.items():
        parts.append(f'<text x="4" y="{y + 17}" font-weight="bold">{escape(title)}</text>')
        y += TOP
        for rank in range(timeline.num_ranks):
            parts.append(f'<text x="4" y="{y + 15}">rank {rank}</text>')
            parts.extend(_rectangle(step, y, scale) for step in timeline.of_rank(rank))
            y += ROW + GAP
        y += TOP - GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" role="img" font-family="sans-serif" font-size="11" fill="#777">\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _rectangle(step: Step, y: int, scale: float) -> str:
    """One step, with its name if there is room for it."""
    x, length = LEFT + step.start * scale, (step.end - step.start) * scale
    text = str(step.item)
    tip = f"rank {step.rank}: {text}, {step.start:.6g} to {step.end:.6g}"
    shown = (
        f'<text x="{x + length / 2:.2f}" y="{y + 15}" fill="#fff" text-anchor="middle">'
        f"{text}</text>"
        if length > 7 * len(text)
        else ""
    )
    return (
        f'<g><title>{tip}</title><rect x="{x:.2f}" y="{y}" width="{max(0.5, length - 0.5):.2f}" '
        f'height="{ROW}" rx="2" fill="{COLOURS[_meaning(step.item)]}"/>{shown}</g>'
    )


def _meaning(item: Item) -> str:
    if item.kind is Kind.OVERLAP:
        return "pair"
    return {FORWARD: "forward", BACKWARD: "backward", INPUT: "inputs"}.get(item.kind, "weights")


def to_page(what: Any, measured: Timeline | None = None, unit: str = "") -> str:
    """A page with the timelines over each other on one scale of time, and with their numbers.

    Args:
        what: as in ``to_text``.
        measured: the steps that ran, to draw below a simulation in the unit of its costs. The
            measurement of ``pipe.measure()`` has both: give it as ``what``.
        unit: the name of the unit of time; that of a measurement is ``s``.

    Raises:
        ArgumentError: it is nothing that can be drawn, the measured timeline is of another number
            of ranks, or the unit is no text.
        ScheduleError: the schedule cannot run.

    Example:
        >>> from echelon.pipeline import schedule, simulate
        >>> simulation = simulate(schedule("1f1b", 2, 4, 2))
        >>> page = to_page(simulation, measured=simulation.timeline)
        >>> page.count("<svg"), "measured" in page
        (1, True)
    """
    checks.instance("unit", unit, str)
    drawn = drawn_of(what)
    unit, simulation = unit or drawn.unit, drawn.simulation
    timelines = dict(drawn.timelines)
    checks.instance("measured", measured, Timeline, or_none=True)
    if measured is not None:
        if simulation is not None and measured.num_ranks != simulation.schedule.num_ranks:
            raise ArgumentError(
                f"the measured timeline has {measured.num_ranks} ranks and the simulated one "
                f"{simulation.schedule.num_ranks}; draw two runs of the same schedule"
            )
        timelines["measured"] = measured
    key = " ".join(f'<span style="background:{c}">{name}</span>' for name, c in COLOURS.items())
    drawing = f'<p class="key">{key}</p>\n{to_svg(timelines)}'
    body = [section("Timelines", "", drawing + table(TOTALS, totals(timelines, unit)))]
    title = "Timelines of a pipeline"
    if simulation is not None:
        title = title_of(simulation.schedule)
        heads, rows = by_rank(simulation, timelines.get("measured"))
        about = f"Time in {unit}." if unit else ""
        body.append(section("Simulated, by rank", about, table(heads, rows)))
    return page(title, "A pipeline's schedule", body, dark=True)


def title_of(schedule: Schedule) -> str:
    """The name and the sizes of a schedule."""
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches"
    )


TOTALS = ["timeline", "time", "bubble"]


def totals(timelines: Mapping[str, Timeline], unit: str = "") -> list[list[str]]:
    """A row for each timeline, below the heads of ``TOTALS``."""
    rows = []
    for name, timeline in timelines.items():
        busy = sum(step.end - step.start for step in timeline.steps)
        bubble = 1 - busy / (timeline.num_ranks * timeline.makespan) if timeline.makespan else 0.0
        rows.append([name, f"{timeline.makespan:.6g} {unit}".rstrip(), f"{bubble:.2%}"])
    return rows


def by_rank(
    simulation: Simulation, measured: Timeline | None = None
) -> tuple[list[str], list[list[str]]]:
    """The heads and rows of a table of the peak memory and the causes of idle time, by rank."""
    head = ["rank", "peak", "busy", "warm-up", "steady", "drain", "messages", "waiting on"]
    rows = []
    for rank, (busy, idle) in enumerate(zip(simulation.busy, simulation.idle, strict=True)):
        numbers = (busy, idle.warm_up, idle.steady, idle.drain, idle.messages)
        waits = ", ".join(f"{peer}: {t:.4g}" for peer, t in sorted(idle.waiting_on.items())) or "–"
        row = [str(rank), f"{simulation.peak[rank]:g}", *(f"{n:.4g}" for n in numbers), waits]
        if measured is not None:
            ran = sum(step.end - step.start for step in measured.of_rank(rank))
            row.append(f"{ran:.4g}")
        rows.append(row)
    if measured is not None:
        head.append("measured busy")
    return head, rows
