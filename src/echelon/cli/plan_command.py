"""``echelon plan``: the plans of a cluster that fit and are best, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from echelon.checks import is_count, positive
from echelon.cli.output import say
from echelon.cli.schedule_command import write_files
from echelon.errors import ArgumentError, UnsupportedError
from echelon.errors.message_text import printable_line
from echelon.planner.api import Place, limits_of, place_of
from echelon.planner.described_model import described
from echelon.planner.device import MOST_BYTES
from echelon.planner.layout import Layout
from echelon.planner.layout_space import LayoutSpace
from echelon.planner.plan_options import layout_text, missing_in_plan, plan_text
from echelon.planner.plan_page import plans_page
from echelon.planner.plan_views import count_text, plan_table
from echelon.planner.priced_plan import PricedPlan
from echelon.planner.ranked_plans import Plans
from echelon.planner.refusal import RefusedPlan

_AS_TEXT = ("plan", "besides matrices")
_MOST_REFUSED = 3  # where none fits
_AXES = ("tp", "cp", "ep", "pp", "chunks", "dp", "shard", "microbatch", "microbatches")


def searched(
    model: Path,
    cluster: Place,
    *,
    global_batch: int,
    seq: int | None,
    price: float | None,
    axes: str,
    stack: str,
    fixed: Sequence[str],
    max_memory_gib: float | None,
    keep: int,
) -> LayoutSpace:
    """The model, the cluster, the constants and the limits that options name, as ``ec.plan``."""
    nbytes = max_memory_gib
    if nbytes is not None:
        nbytes = positive("--max-memory", nbytes, MOST_BYTES / 2**30) * 2**30
    limits = limits_of(global_batch, _axes(fixed), nbytes, axes, keep)  # type: ignore[arg-type]
    place, software = place_of(cluster, price, stack)
    return LayoutSpace(described(model, seq), place, software, limits)


def show(
    space: LayoutSpace,
    goal: str,
    best: int,
    num_refused: int,
    explain: int | None,
    html: Path | None,
    *,
    as_json: bool,
) -> int:
    """Print the best plans; returns 1 if none fits.

    Args:
        best: how many plans are shown.
        num_refused: how many plans that do not fit are shown; at least some where none fits.
        explain: the number of a plan whose terms are shown.
        html: where a page is written; None for no page.
    """
    plans = Plans(space, goal)  # type: ignore[arg-type]
    if as_json:
        say(json.dumps(_record(plans, best, num_refused), indent=2))
    else:
        if not plans:
            say(f"None of {plans.num_layouts} plans fits. The nearest:")
        elif explain is not None:
            _explain(plans, explain)
        else:
            _table(plans, best)
        for refused in _nearest(plans, num_refused):
            say(f"  {refused}")
        if not plans:
            say(f"{plans.how_many_fit()}.")
    if html is not None:
        write_files({"html": html}, lambda form: plans_page(plans), "the page of plans")
    return 0 if plans else 1


def _nearest(plans: Plans, num_refused: int) -> Sequence[RefusedPlan]:
    """Some that do not fit, where none does or they are asked for: only then does one wait until
    every plan has been looked at."""
    count = num_refused or _MOST_REFUSED * (not plans)
    return plans.refused[:count] if count else ()


def _axes(texts: Sequence[str]) -> dict[str, int | str]:
    fixed: dict[str, int | str] = {}
    for text in texts:
        name, value = _axis(text)
        if fixed.setdefault(name, value) != value:
            raise ArgumentError(f"--fix gives {name} as {fixed[name]} and as {value}: give it once")
    return fixed


def _axis(text: str) -> tuple[str, int | str]:
    name, _, value = (part.strip() for part in text.partition("="))
    if name in ("schedule", "offload"):
        return name, value
    if not is_count(value):
        raise ArgumentError(f"--fix is {text!r:.40}: give an axis and its length, such as pp=4")
    return name, int(value)


def _record(plans: Plans, best: int, num_refused: int) -> dict[str, object]:
    return {
        "num_layouts": plans.num_layouts,
        "num_fitting": plans.num_fitting,
        "goal": plans.goal,
        "plans": [_plan_record(priced) for priced in plans[:best]],
        "refused": [_refusal_record(refused) for refused in _nearest(plans, num_refused)],
    }


def _plan_record(priced: PricedPlan) -> dict[str, object]:
    layout = priced.layout
    try:
        call = plan_text(layout, tied=priced.tied, in_16_bits=priced.stack.in_16_bits)
    except UnsupportedError:
        call = None
    return {
        "plan": str(priced),
        "call": call,
        "devices": priced.cluster.num_devices,
        **_layout_record(layout),
        "step_s": priced.seconds,
        "tokens_per_second": priced.tokens_per_second,
        "mfu": priced.mfu,
        "cost_of_million_tokens": priced.cost,
        "peak_gib": priced.memory.total / 2**30,
        "seconds": priced.time.terms(),
        "bytes": priced.memory.categories(),
    }


def _layout_record(layout: Layout) -> dict[str, object]:
    return {
        **{axis: getattr(layout, axis) for axis in _AXES},
        "schedule": None if layout.pp == 1 else layout.schedule_name,
        "sharded": layout.sharded.name.lower(),
        "recompute": layout.recompute.value,
        "offload": layout.offload.value,
    }


def _refusal_record(refused: RefusedPlan) -> dict[str, object]:
    return {
        "plan": layout_text(refused.layout),
        **_layout_record(refused.layout),
        "rank": refused.rank,
        "moment": refused.moment,
        "needs": refused.nbytes,
        "limit": refused.limit,
        "bytes": refused.memory.categories(),
    }


def _table(plans: Plans, best: int) -> None:
    console = Console()
    console.print(
        f"{count_text(plans.model.num_parameters)} parameters on {plans.cluster.num_devices} "
        f"{printable_line(plans.cluster.device.name)}: {plans.num_fitting} of {plans.num_layouts} "
        "plans fit",
        markup=False,  # the name of a device is what its file says
    )
    table = _drawn(plans[:best], with_bounds=True)
    if Measurement.get(console, console.options, table).minimum > console.width:
        table = _drawn(plans[:best], with_bounds=False)
    console.print(table)
    if any(missing_in_plan(planned.layout) for planned in plans[:best]):
        console.print(
            "An ec.Plan does not say all of these: --axes plan looks at those that it does."
        )


def _drawn(plans: Sequence[PricedPlan], *, with_bounds: bool) -> Table:
    """A table whose words stay whole where the terminal has the columns."""
    content = plan_table(plans, with_bounds=with_bounds)
    table = Table(box=None, header_style="bold")
    columns = zip(content.heads, *content.rows, strict=True)
    table.add_column("", justify="right")
    for name, *cells in columns:
        justify: Literal["left", "right"] = "left" if name in _AS_TEXT else "right"
        longest = max(len(word) for cell in (name, *cells) for word in cell.split())
        table.add_column(name, justify=justify, overflow="fold", min_width=longest)
    for number, row in enumerate(content.rows, 1):
        table.add_row(str(number), *row)
    return table


def _explain(plans: Plans, number: int) -> None:
    if not 1 <= number <= len(plans):
        raise ArgumentError(f"--explain is {number}; there are plans 1 to {len(plans)}")
    say(f"plan {number}: {plans[number - 1].explain()}")
