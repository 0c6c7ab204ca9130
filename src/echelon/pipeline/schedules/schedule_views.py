"""What ``ec.show`` says about schedules, simulations, timelines and choices."""

from __future__ import annotations

from echelon.errors import ArgumentError, ScheduleError
from echelon.page import Picture, TextTable, View, ViewPart, view_of
from echelon.pipeline.schedules.choose import Choice
from echelon.pipeline.schedules.ir import Schedule
from echelon.pipeline.schedules.render import (
    COLOURS,
    TOTALS,
    Drawn,
    by_rank,
    drawn_of,
    title_of,
    to_svg,
    to_text,
    totals,
)
from echelon.pipeline.schedules.simulate import Simulation, Timeline, simulate

_MOST_STEPS = 3000  # more make the picture larger than a notebook should store
_MOST_ROWS = 16  # of a table by rank
_SVG_WIDTH = 920  # pixels
_WIDEST_TEXT = 200  # characters of a row of a terminal


@view_of.register
def _(shown: Schedule) -> View:
    try:
        simulation = simulate(shown)
    except ScheduleError as error:
        return View(
            title=title_of(shown),
            parts=[
                ViewPart(title="It cannot run", content=str(error)),
                ViewPart(title="What each rank does, in order", content=_short(str(shown))),
            ],
        )
    view = view_of(simulation)
    about = "A forward counts 1, a backward 2; simulate(schedule, costs) takes yours."
    timelines, *others = view.parts
    first = ViewPart(title=timelines.title, about=about, content=timelines.content)
    return View(title=view.title, facts=view.facts, parts=[first, *others])


@view_of.register
def _(shown: Simulation) -> View:
    facts = [
        (f"{shown.makespan:.6g}", "time"),
        (f"{shown.span_bubble:.2%}", "bubble"),
        (f"{max(shown.peak, default=0):g}", "most microbatches alive on a rank"),
    ]
    if shown.peak_nbytes is not None:
        facts.append((f"{max(shown.peak_nbytes):,}", "bytes of activations, peak"))
    return View(
        title=title_of(shown.schedule),
        facts=facts,
        parts=[timelines_part(drawn_of(shown)), ranks_part(shown)],
    )


@view_of.register
def _(shown: Timeline) -> View:
    title = f"A timeline of {shown.num_ranks} ranks and {len(shown.steps)} steps"
    return View(title=title, parts=[timelines_part(drawn_of(shown))])


@view_of.register
def _(shown: Choice) -> View:
    heads = ["schedule", "time", "bubble", "own bubble", "peak", "messages", ""]
    rows = []
    for row in shown.rows:
        simulation = row.simulation
        mark = "recommended" if row is shown.recommended else "" if row.fits else "over the cap"
        numbers = [f"{simulation.makespan:.4g}", f"{simulation.span_bubble:.2%}"]
        numbers += [f"{simulation.own_bubble:.2%}", f"{row.peak:g}", str(row.messages)]
        rows.append([str(row), *numbers, mark])
    table = TextTable(heads=heads, rows=rows)
    return View(
        title=f"{len(rows)} schedules",
        parts=[
            ViewPart(title="From the fastest to the slowest", content=table),
            ViewPart(title="Recommended", content=shown.reason),
        ],
    )


def timelines_part(drawn: Drawn) -> ViewPart:
    """The picture of timelines; a sentence where it would be too large to be looked at."""
    num_steps = sum(len(timeline.steps) for timeline in drawn.timelines.values())
    if num_steps > _MOST_STEPS:
        content: Picture | str = (
            f"{num_steps} steps are too many for a picture here; ec.pipeline.to_svg and to_page "
            "draw them into a file"
        )
        return ViewPart(title="Timelines", content=content)
    svg = _legend() + to_svg(drawn.timelines, width=_SVG_WIDTH)
    title = ", then ".join(drawn.timelines)
    return ViewPart(
        title=title[:1].upper() + title[1:],
        about=_READING,
        content=Picture(svg=svg, text=_text(drawn)),
    )


_READING = (
    "Time runs to the right, one row for each rank. 2F0 is the forward of stage 2 for microbatch "
    "0; B is a backward, I and W its halves for inputs and weights."
)


def _legend() -> str:
    spans = "".join(
        f'<span style="background: {colour}; color: #fff; padding: 0 7px; margin-right: 6px; '
        f'border-radius: 3px">{name}</span>'
        for name, colour in COLOURS.items()
    )
    return f'<div style="margin: 4px 0">{spans}</div>\n'


def _text(drawn: Drawn) -> str:
    try:
        text = to_text(drawn.timelines, unit=drawn.cell)
    except ArgumentError as error:
        return str(error)
    return _short(text)


def _short(text: str) -> str:
    """The text with its rows cut at the width of a wide terminal."""
    rows = text.splitlines()
    cut = [row if len(row) <= _WIDEST_TEXT else f"{row[: _WIDEST_TEXT - 1]}…" for row in rows]
    more = [f"… and {len(cut) - 64} more rows"] if len(cut) > 64 else []
    return "\n".join([*cut[:64], *more])


def ranks_part(simulation: Simulation, measured: Timeline | None = None) -> ViewPart:
    """The table of peak memory and causes of idle time, of the first ranks."""
    heads, rows = by_rank(simulation, measured)
    about = "" if len(rows) <= _MOST_ROWS else f"The first {_MOST_ROWS} of {len(rows)} ranks."
    table = TextTable(heads=heads, rows=rows[:_MOST_ROWS])
    return ViewPart(title="By rank", about=about, content=table)


def totals_part(drawn: Drawn) -> ViewPart:
    """The table of the times and bubbles of timelines."""
    table = TextTable(heads=TOTALS, rows=totals(drawn.timelines, drawn.unit))
    return ViewPart(title="In all", content=table)
