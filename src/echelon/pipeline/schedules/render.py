"""Draws simulated and measured timelines as text for a terminal, as SVG and as a page of HTML.

The page is one file that loads no other. It shows a schedule as planned and as it ran.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from echelon import checks
from echelon.errors import ArgumentError
from echelon.page import page, section, table
from echelon.pipeline.schedules.ir import BACKWARD, FORWARD, INPUT, Item, Kind
from echelon.pipeline.schedules.simulate import Simulation, Step, Timeline

MAX_ROW_CHARS = 4000  # longer rows of text are unreadable

# Geometry of the SVG, in pixels.
ROW, GAP, LEFT, TOP, RIGHT = 22, 4, 64, 26, 16

COLOURS = {"forward": "#4c78a8", "backward": "#e0803a", "inputs": "#eca82c", "weights": "#72a860"}
COLOURS |= {"pair": "#8a6fb0"}


def to_text(timeline: Timeline, unit: float | None = None) -> str:
    """A grid: one row per rank, time to the right, a dot where a rank is idle.

    Args:
        timeline: what to draw.
        unit: how much time one cell is; the shortest step if None. A step takes at least one cell.

    Raises:
        ArgumentError: the grid would be wider than 4000 characters; give a larger unit.

    Example:
        >>> from echelon.pipeline import schedule, simulate
        >>> simulation = simulate(schedule("1f1b", 2, 2, 2), {"F": 1, "B": 2})
        >>> print(to_text(simulation.timeline))
        rank 0 | 0F0 0F1  .   .  0B0 ===  .  0B1 ===
        rank 1 |  .  1F0 1B0 === 1F1 1B1 ===  .   .
    """
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


def to_svg(timelines: Mapping[str, Timeline], width: int = 1200) -> str:
    """A drawing of one or more timelines over each other, all on one scale of time.

    Each step has its text and its times as a tooltip.

    Args:
        timelines: by title, from top to bottom.
        width: pixels.

    Example:
        >>> from echelon.pipeline import schedule, simulate
        >>> simulation = simulate(schedule("1f1b", 2, 2, 2))
        >>> to_svg({"simulated": simulation.timeline}).count("<rect")
        8
    """
    longest = max((timeline.makespan for timeline in timelines.values()), default=0.0) or 1.0
    scale = (width - LEFT - RIGHT) / longest
    y, parts = 0, list[str]()
    for title, timeline in timelines.items():
        parts.append(f'<text x="4" y="{y + 17}" class="title">{escape(title)}</text>')
        y += TOP
        for rank in range(timeline.num_ranks):
            parts.append(f'<text x="4" y="{y + 15}" class="rank">rank {rank}</text>')
            parts.extend(_rectangle(step, y, scale) for step in timeline.of_rank(rank))
            y += ROW + GAP
        y += TOP - GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" width="{width}" '
        f'height="{y}" role="img">\n<style>text {{ font: 11px sans-serif; fill: #777 }} '
        ".title { font-weight: bold } .step { fill: #fff; text-anchor: middle }</style>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _rectangle(step: Step, y: int, scale: float) -> str:
    """One step, with its name if there is room for it."""
    x, length = LEFT + step.start * scale, (step.end - step.start) * scale
    text = str(step.item)
    tip = f"rank {step.rank}: {text}, {step.start:.6g} to {step.end:.6g}"
    shown = (
        f'<text x="{x + length / 2:.2f}" y="{y + 15}" class="step">{text}</text>'
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


def to_page(simulation: Simulation, measured: Timeline | None = None, unit: str = "") -> str:
    """The simulated timeline, the measured one under it on the same scale, and both in numbers.

    Args:
        simulation: of the schedule as planned.
        measured: the steps that ran, in the unit of the costs of the simulation.
        unit: name of that unit, such as ``s``.

    Raises:
        ArgumentError: the measured timeline is of another number of ranks, or the unit is no text.

    Example:
        >>> from echelon.pipeline import schedule, simulate
        >>> simulation = simulate(schedule("1f1b", 2, 4, 2))
        >>> page = to_page(simulation, measured=simulation.timeline)
        >>> page.count("<svg"), "measured" in page
        (1, True)
    """
    checks.instance("unit", unit, str)
    schedule = simulation.schedule
    timelines = {"simulated": simulation.timeline}
    if measured is not None:
        if measured.num_ranks != schedule.num_ranks:
            raise ArgumentError(
                f"the measured timeline has {measured.num_ranks} ranks and the simulated one "
                f"{schedule.num_ranks}; draw two runs of the same schedule"
            )
        timelines["measured"] = measured
    title = (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages, "
        f"{schedule.num_microbatches} microbatches"
    )
    key = " ".join(f'<span style="background:{c}">{name}</span>' for name, c in COLOURS.items())
    drawing = f'<p class="key">{key}</p>\n{to_svg(timelines)}'
    body = [
        section("Timelines", "", drawing + _totals(timelines, unit)),
        section(
            "Simulated, by rank", f"Time in {unit}." if unit else "", _ranks(simulation, measured)
        ),
    ]
    return page(title, "A pipeline's schedule", body, dark=True)


def _totals(timelines: dict[str, Timeline], unit: str) -> str:
    rows = []
    for name, timeline in timelines.items():
        busy = sum(step.end - step.start for step in timeline.steps)
        bubble = 1 - busy / (timeline.num_ranks * timeline.makespan) if timeline.makespan else 0.0
        rows.append([name, f"{timeline.makespan:.6g} {unit}".rstrip(), f"{bubble:.2%}"])
    return table(["timeline", "time", "bubble"], rows)


def _ranks(simulation: Simulation, measured: Timeline | None) -> str:
    """A table of the peak memory and the causes of idle time, by rank."""
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
    return table(head, rows)
