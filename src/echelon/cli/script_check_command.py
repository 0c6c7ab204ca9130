"""``echelon plan --check``: whether a script fits on devices that are not here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from echelon.checks import positive
from echelon.cli.output import say
from echelon.errors import ArgumentError, StateError
from echelon.launch.program import Program
from echelon.page import bytes_text
from echelon.planner.cluster import Cluster
from echelon.planner.device import MOST_BYTES
from echelon.plans.axes import AXES, axes_of, plan_argument


def show(
    script: str,
    arguments: Sequence[str],
    cluster_text: str,
    fixed: Sequence[str],
    max_memory_gib: float | None = None,
) -> int:
    """Print what each stage of a script allocates; returns 1 if it does not fit, and 2 if the
    script failed.

    Args:
        arguments: of the script; its plan is that of a ``--plan`` among them.
        fixed: axes, each as ``pp=4``, of a script without one; else all devices are replicas.
        max_memory_gib: GiB of a device that may be allocated; None: its memory without a margin.

    Raises:
        ArgumentError: the plan is for another number of devices than the cluster has.
    """
    # It brings torch.
    from echelon.planner.script_check import check_script
    from echelon.plans.plans import Plan

    cluster = Cluster.parse(cluster_text)
    limit = cluster.device.usable_bytes
    if max_memory_gib is not None:
        limit = positive("--max-memory", max_memory_gib, MOST_BYTES / 2**30) * 2**30
    program = Program(script)
    if (problem := program.problem()) is not None:
        raise ArgumentError(problem)
    axes: dict[str, Any] = {**_axes(arguments, fixed, cluster.num_devices)}
    if axes.get("pp", 1) > 1:  # the script has its own; only the numbers of ranks count here
        axes["microbatches"] = axes["pp"]
    plan = Plan(**axes)
    if plan.num_ranks != cluster.num_devices:
        raise ArgumentError(
            f"the plan {plan} is for {plan.num_ranks} ranks, and the cluster has "
            f"{cluster.num_devices} devices"
        )
    try:
        stages = check_script(program, arguments, plan)
    except StateError as error:
        say(str(error), err=True)
        return 2
    table = Table(box=None, header_style="bold")
    for name in ("stage", "rank", "kept", "peak", f"of {bytes_text(int(limit))}"):
        table.add_column(name, justify="right")
    for stage in stages:
        fits = "fits" if stage.peak <= limit else "[red]does not fit[/]"
        row = str(stage.stage), str(stage.rank), bytes_text(stage.kept), bytes_text(stage.peak)
        table.add_row(*row, fits)
    Console().print(table)
    return int(any(stage.peak > limit for stage in stages))


def _axes(arguments: Sequence[str], fixed: Sequence[str], devices: int) -> dict[str, int]:
    """The axes of the script's plan, or those that are given; the other ranks are replicas."""
    text = plan_argument(arguments)
    if text is not None:
        if fixed:
            raise ArgumentError(
                f"--fix is {fixed[0]!r:.40}, and the script has --plan {text}: give one of them"
            )
        return axes_of(text)
    axes = axes_of(",".join(fixed)) if fixed else {}
    taken = 1
    for name in AXES:
        taken *= axes.get(name, 1)
    if "dp" not in axes and devices % taken == 0:
        axes["dp"] = devices // taken
    return axes
