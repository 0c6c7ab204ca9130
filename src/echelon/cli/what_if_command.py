"""``echelon plan --scale`` and ``--mtbf``: more devices, and failures of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from echelon.checks import is_count, positive
from echelon.cli.output import cell, say
from echelon.errors import ArgumentError
from echelon.planner.layout_space import LayoutSpace
from echelon.planner.plan_options import layout_text
from echelon.planner.what_if import FailureCost, ScalePoint, failure_cost, scaled

_HOUR = 3600.0
_MOST = 1e15
_TOKENS = 1e9  # that device hours are given for


def failures_of(
    mtbf_hours: float | None, save_gbytes: float | None, restart_minutes: float
) -> dict[str, float] | None:
    """What ``failure_cost`` takes of failures; None if nothing fails.

    Args:
        mtbf_hours: between two failures of one host, in the mean; None: nothing fails.
        save_gbytes: that one host saves in a second.
        restart_minutes: from a failure until the training goes on.
    """
    if mtbf_hours is None:
        return None
    if save_gbytes is None:
        raise ArgumentError(
            "--mtbf needs --save-rate, the GB that one host saves in a second: measure it with a "
            "save of this training, or with dd on its file system"
        )
    return {
        "mtbf_s": positive("--mtbf", mtbf_hours, _MOST) * _HOUR,
        "save_rate": positive("--save-rate", save_gbytes, _MOST) * 1e9,
        "restart_s": positive("--restart", restart_minutes, _MOST) * 60,
    }


def show(
    space: LayoutSpace, scale: str, failures: dict[str, float] | None, *, as_json: bool
) -> int:
    """Print the best plan of each size; returns 1 if there is none for any.

    Args:
        scale: numbers of devices with commas between them; empty: those of the cluster.
    """
    sizes = _sizes(scale) if scale else [space.cluster.num_devices]
    points = scaled(space, sizes)
    costs = [
        None
        if failures is None or point.plan is None
        else failure_cost(space.model, point.cluster, **failures)
        for point in points
    ]
    rows = [_row(point, cost) for point, cost in zip(points, costs, strict=True)]
    if as_json:
        say(json.dumps(rows, indent=2))
    else:
        _table(rows)
    return 0 if any(point.plan for point in points) else 1


def _sizes(text: str) -> list[int]:
    sizes = text.split(",")
    if not all(is_count(size.strip()) for size in sizes):
        raise ArgumentError(f"--scale is {text!r:.80}: give numbers of devices, such as 8,16,32")
    return [int(size) for size in sizes]


def _row(point: ScalePoint, cost: FailureCost | None) -> dict[str, Any]:
    row: dict[str, Any] = {"devices": point.cluster.num_devices}
    if point.plan is None:
        return {**row, "reason": point.reason}
    row |= {
        "plan": layout_text(point.plan.layout),
        "step_s": point.step_s,
        "tokens_per_second": point.tokens_per_second,
        "device_hours_for_1e9_tokens": point.device_hours(_TOKENS),
    }
    if cost is not None:
        lost = cost.lost if math.isfinite(cost.lost) else None
        row |= {"save_s": cost.save_s, "interval_s": cost.interval_s, "lost": lost}
    return row


def _table(rows: Sequence[dict[str, Any]]) -> None:
    fails = any("save_s" in row for row in rows)
    table = Table(box=None, header_style="bold")
    names = ["devices", "plan", "step s", "tokens/s", "device h for 1e9 tokens"]
    for name in [*names, "save s", "checkpoint every min", "lost"] if fails else names:
        justify: Literal["left", "right"] = "left" if name == "plan" else "right"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        if "reason" in row:
            table.add_row(str(row["devices"]), cell(row["reason"]))
            continue
        cells = [
            str(row["devices"]),
            row["plan"],
            f"{row['step_s']:.3g}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['device_hours_for_1e9_tokens']:,.1f}",
        ]
        if fails:
            lost = "all" if row["lost"] is None else f"{row['lost']:.1%}"
            cells += [f"{row['save_s']:.3g}", f"{row['interval_s'] / 60:.3g}", lost]
        table.add_row(*cells)
    Console().print(table)
