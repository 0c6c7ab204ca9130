"""``plans_page``: a page with the best plans, what they take, and which do not fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from echelon.page import (
    CHART_SCRIPT,
    CHART_STYLE,
    Bar,
    BarRows,
    Chart,
    Curve,
    Row,
    Stroke,
    TextTable,
    facts,
    page,
    section,
    table,
)
from echelon.pipeline.schedules.render import COLOURS, to_svg
from echelon.pipeline.schedules.simulate import Simulation
from echelon.planner.plan_timeline import drawn_microbatches, memory_curve, simulated
from echelon.planner.plan_views import count_text, plan_facts, plan_table, refused_table
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.ranked_plans import Plans

_MOST_BROKEN_DOWN = 5
_MOST_REFUSED = 20
_WIDTH = 1080  # of the schedule, in pixels
# The colour of each term of the time, and of each category of the memory.
_TERMS = {
    "matmul": "curve",
    "attention": "second",
    "memory": "weights",
    "launch": "saving",
    "exchange": "communication",
    "gather": "gathered",
    "message": "inputs",
    "bubble": "idle",
    "reduce": "gradients",
    "optimizer": "optimizer",
    "other": "other",
}
_CATEGORIES = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "state",
    "gathered": "gathered",
    "activations": "forward",
    "working": "buffers",
    "logits": "data",
}


def plans_page(plans: Plans) -> str:
    """The HTML of a page that loads no other file."""
    subtitle = (
        f"{count_text(plans.model.num_parameters)} parameters on {plans.cluster.num_devices} "
        f"{plans.cluster.device.name}: {plans.num_fitting} of "
        f"{plans.num_layouts} plans fit; the goal is {plans.goal}"
    )
    body = _of_fitting(plans) if plans else [section("None fits", "", "")]
    return page(
        "Plans",
        subtitle,
        [*body, *_of_refused(plans)],
        script=CHART_SCRIPT,
        style=CHART_STYLE,
        dark=True,
    )


def _of_fitting(plans: Plans) -> Iterator[str]:
    best, few = plans.best, plans[:_MOST_BROKEN_DOWN]
    yield facts(plan_facts(best))
    yield section("From the best on", "", _table(plan_table(plans, with_bounds=False)))
    options = f"<pre>{escape(chr(10).join(best.options()))}</pre>"
    yield section("The best plan as a line of a script", "", options)
    about = "What the slowest rank does and waits for, added up."
    times = [(str(plan), plan.time.terms(), f"{plan.seconds:.3g} s") for plan in few]
    yield section("Where the time of a step goes", about, _bars(times, _TERMS, "seconds", 1.0))
    about = f"Of the fullest rank; {best.limit / 2**30:.1f} GiB may be allocated."
    sizes = [
        (str(plan), plan.memory.categories(), f"{plan.memory.total / 2**30:.1f} GiB")
        for plan in few
    ]
    yield section("What the memory is for", about, _bars(sizes, _CATEGORIES, "GiB", 2.0**30))
    simulation = simulated(best, drawn_microbatches(best))
    if best.layout.pp > 1:
        yield _schedule(best, simulation)
    yield _memory_over_time(best, simulation)
    yield _pareto(plans)
    texts = "".join(
        f"<details><summary>{escape(str(plan))}</summary><pre>{escape(plan.explain())}</pre>"
        "</details>"
        for plan in plans
    )
    yield section("All terms", "", texts)


def _of_refused(plans: Plans) -> Iterator[str]:
    if plans.refused:
        about = (
            "Of each combination of axes and sharding of which nothing fits, the plan that needs "
            "least; from the nearest on."
        )
        rows = refused_table(plans.refused[:_MOST_REFUSED])
        yield section("What does not fit", about, _table(rows))


def _bars(
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    meanings: Mapping[str, str],
    axis: str,
    unit: float,
) -> str:
    drawn = []
    for name, values, total in rows:
        bars, start = [], 0.0
        for what, value in values.items():
            end = start + value / unit
            tip = f"{what}: {value / unit:.3g} {axis}"
            bars.append(Bar(start=start, end=end, meaning=meanings[what], text=what, tip=tip))
            start = end
        drawn.append(Row(name=name, bars=bars, total=total))
    shown = {name for _, values, _ in rows for name, value in values.items() if value}
    legend = {meaning: name for name, meaning in meanings.items() if name in shown}
    return BarRows(rows=drawn, legend=legend, axis=axis).html()


def _drawn_with(plan: PricedPlan, simulation: Simulation) -> str:
    """A sentence where a picture has fewer microbatches than the step."""
    count = simulation.schedule.num_microbatches
    if count == plan.layout.microbatches:
        return ""
    return f" Drawn with {count} of the {plan.layout.microbatches} microbatches of a step."


def _schedule(plan: PricedPlan, simulation: Simulation) -> str:
    about = f"{plan.schedule} of the best plan; a row is one of the ranks of a position on pp."
    about += _drawn_with(plan, simulation)
    kinds = COLOURS.items()
    key = " ".join(f'<span style="background:{paint}">{kind}</span>' for kind, paint in kinds)
    return section(
        "The schedule", about, f'<p class="key">{key}</p>\n{to_svg(simulation, width=_WIDTH)}'
    )


def _memory_over_time(plan: PricedPlan, simulation: Simulation) -> str:
    moments = memory_curve(plan, simulation)
    times, sizes = [moment.seconds for moment in moments], plan.memory.categories()
    values = {
        what: [sizes[what] for _ in moments]
        for what in ("parameters", "optimizer", "gathered", "working", "logits")
        if sizes[what]
    }
    values["gradients"] = [moment.gradients for moment in moments]
    values["activations"] = [moment.activations for moment in moments]
    curves = [
        Curve(
            name=what,
            x=times,
            y=[nbytes / 2**30 for nbytes in column],
            meaning=_CATEGORIES[what],
            stroke=Stroke.AREA,
        )
        for what, column in values.items()
    ]
    about = f"Of a rank of stage {plan.memory.rank_stage} of the best plan."
    about += _drawn_with(plan, simulation)
    chart = Chart(curves=curves, x_label="seconds", y_label="GiB")
    return section("Memory over the step", about, chart.html())


def _pareto(plans: Plans) -> str:
    front = plans.pareto[::-1]
    curve = Curve(
        name="no plan is both faster and smaller",
        x=[plan.memory.total / 2**30 for plan in front],
        y=[plan.seconds for plan in front],
        meaning="curve",
        stroke=Stroke.JOINED,
    )
    chart = Chart(curves=[curve], x_label="GiB on the fullest rank", y_label="seconds a step")
    about = "The plans of which no other is both faster and smaller."
    rows = plan_table(front[::-1], with_bounds=False)
    return section("Time and memory", about, chart.html() + _table(rows))


def _table(content: TextTable) -> str:
    return table(content.heads, content.rows)
