"""What ``ec.show`` and a notebook say about ``Plans`` and about one of them."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import fill

from echelon.page import TextTable, View, ViewPart, view_of
from echelon.pipeline.schedules.render import drawn_of
from echelon.pipeline.schedules.schedule_views import timelines_part
from echelon.planner.plan_options import layout_text
from echelon.planner.plan_timeline import drawn_microbatches, simulated
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.ranked_plans import Plans
from echelon.planner.refusal import RefusedPlan

_MOST_REFUSED = 10
_WIDTH = 76  # characters of a line


def count_text(count: float) -> str:
    """A number of parameters in three digits and a unit.

    Example:
        >>> [count_text(n) for n in (35_264, 124_439_808, 8_030_261_248, 405_853_388_800)]
        ['35.3 K', '124 M', '8.03 B', '406 B']
    """
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if count >= 0.9995 * unit:
            digits = next((d for d in (2, 1) if count / unit < 10 ** (3 - d) - 0.5 * 10**-d), 0)
            return f"{count / unit:.{digits}f}{name}"
    return f"{count:.0f}"


@view_of.register
def _(shown: Plans) -> View:
    facts = [
        (count_text(shown.model.num_parameters), "parameters"),
        (f"{shown.cluster.num_devices} {shown.cluster.device.name}", "devices"),
        (f"{shown.num_fitting} of {shown.num_layouts}", "plans fit"),
    ]
    if shown:
        table = plan_table(shown, with_bounds=False)
        parts = [
            ViewPart(title="From the best on", about=f"The goal is {shown.goal}.", content=table),
            ViewPart(title="The best one", content=_folded(shown.best)),
        ]
    else:
        table = refused_table(shown.refused[:_MOST_REFUSED])
        parts = [ViewPart(title="None fits; the nearest", content=table)]
    return View(title=f"Plans of {shown.cluster.num_devices} devices", facts=facts, parts=parts)


@view_of.register
def _(shown: PricedPlan) -> View:
    stage = shown.memory.rank_stage
    parts = [
        ViewPart(title="As a line of a script", content=_folded(shown)),
        ViewPart(title="Where the time of a step goes", content=_terms(shown)),
        ViewPart(title="Memory", about=f"Of a rank of stage {stage}.", content=_categories(shown)),
    ]
    if shown.layout.pp > 1:
        simulation = simulated(shown, drawn_microbatches(shown))
        parts.append(timelines_part(drawn_of(simulation)))
    return View(title=f"Plan {shown}", facts=plan_facts(shown), parts=parts)


def plan_facts(plan: PricedPlan) -> list[tuple[str, str]]:
    """Its most important numbers, with their labels."""
    facts = [
        (f"{plan.seconds:.3g} s", "a step"),
        (f"{plan.tokens_per_second:,.0f}", "tokens/s"),
        (f"{plan.mfu:.1%}", "MFU"),
        (f"{plan.memory.total / 2**30:.1f} GiB", "on the fullest rank"),
    ]
    if plan.cost is not None:
        facts.append((f"{plan.cost:.3g}", "for a million tokens"))
    return facts


def plan_table(plans: Iterable[PricedPlan], *, with_bounds: bool = True) -> TextTable:
    """A row for each plan.

    Args:
        with_bounds: whether the last column says which terms are large.
    """
    heads = ["plan", "batch", "step s", "tokens/s", "MFU", "GiB"]
    rows = []
    has_costs = False
    for plan in plans:
        row = [
            str(plan),
            f"{plan.layout.microbatch}x{plan.layout.microbatches}",
            f"{plan.seconds:.3g}",
            f"{plan.tokens_per_second:,.0f}",
            f"{plan.mfu:.1%}",
            f"{plan.memory.total / 2**30:.1f}",
        ]
        if plan.cost is not None:
            has_costs = True
            row += [str(plan.cluster.num_devices), f"{plan.cost:.3g}"]
        rows.append([*row, plan.bounds()] if with_bounds else row)
    heads += ["devices", "cost of 1M tokens"] if has_costs else []
    heads += ["besides matrices"] if with_bounds else []
    return TextTable(heads=heads, rows=rows)


def refused_table(plans: Iterable[RefusedPlan]) -> TextTable:
    """A row for each plan that does not fit."""
    rows = []
    for plan in plans:
        gib = f"{plan.nbytes / 2**30:.2f} of {plan.limit / 2**30:.2f}"
        rows.append([layout_text(plan.layout), str(plan.rank), plan.moment, gib, plan.largest()])
    return TextTable(heads=["plan", "rank", "when", "GiB", "most of it"], rows=rows)


def _folded(plan: PricedPlan) -> str:
    """The plan as a line of a script, in lines that fit a terminal."""
    return "\n".join(fill(line, _WIDTH, subsequent_indent="    ") for line in plan.options())


def _terms(plan: PricedPlan) -> TextTable:
    rows = [
        [name, f"{seconds:.4f}", f"{seconds / plan.seconds:.1%}"]
        for name, seconds in plan.time.terms().items()
    ]
    rows.append(["step", f"{plan.seconds:.4f}", "100.0%"])
    return TextTable(heads=["term", "seconds", "of the step"], rows=rows)


def _categories(plan: PricedPlan) -> TextTable:
    sizes = {**plan.memory.categories(), "in all": plan.memory.total}
    rows = [[name, f"{nbytes / 2**30:.2f}"] for name, nbytes in sizes.items()]
    return TextTable(heads=["category", "GiB"], rows=rows)
