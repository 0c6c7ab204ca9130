"""A page that shows a schedule as it was planned and as it ran; one file, nothing to load."""

from __future__ import annotations

from html import escape

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.render import COLOURS, to_svg
from echelon.pipeline.schedules.simulate import Simulation
from echelon.pipeline.schedules.timeline import Timeline

STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1240px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } td, th { padding: .2em .8em; text-align: right }
th { border-bottom: 1px solid #8888 } td:first-child, th:first-child { text-align: left }
.key span { padding: .1em .5em; margin-right: .5em; border-radius: 3px; color: #fff }
.scroll { overflow-x: auto }
"""


def to_page(simulation: Simulation, measured: Timeline | None = None, unit: str = "") -> str:
    """The simulated timeline, the measured one under it on the same scale, and both in numbers.

    Args:
        simulation: what was planned.
        measured: what ran, in the unit of the costs of the simulation.
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
    if not isinstance(unit, str):
        raise ArgumentError(f"unit is {unit!r:.80}; give its name, such as 's'")
    found = simulation.schedule
    timelines = {"simulated": simulation.timeline}
    if measured is not None:
        if measured.num_ranks != found.num_ranks:
            raise ArgumentError(
                f"the measured timeline has {measured.num_ranks} ranks and the simulated one "
                f"{found.num_ranks}; draw two runs of the same schedule"
            )
        timelines["measured"] = measured
    title = escape(
        f"{found.name}: {found.num_ranks} ranks, {found.num_stages} stages, "
        f"{found.num_microbatches} microbatches"
    )
    key = " ".join(f'<span style="background:{c}">{name}</span>' for name, c in COLOURS.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n"
        f'<p class="key">{key}</p>\n<div class="scroll">{to_svg(timelines)}</div>\n'
        f"{_totals(timelines, unit)}{_ranks(simulation, measured, unit)}</body></html>\n"
    )


def _totals(timelines: dict[str, Timeline], unit: str) -> str:
    rows = []
    for name, timeline in timelines.items():
        busy = sum(step.end - step.start for step in timeline.steps)
        bubble = 1 - busy / (timeline.num_ranks * timeline.makespan) if timeline.makespan else 0.0
        rows.append([name, f"{timeline.makespan:.6g} {unit}".rstrip(), f"{bubble:.2%}"])
    return _table(["timeline", "time", "bubble"], rows)


def _ranks(simulation: Simulation, measured: Timeline | None, unit: str) -> str:
    """Per rank: what it keeps, and where its idle time comes from."""
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
    caption = f" (time in {escape(unit)})" if unit else ""
    return f"<h2>Simulated, by rank{caption}</h2>\n{_table(head, rows)}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows
    )
    return f"<table><tr>{top}</tr>\n{body}</table>\n"
