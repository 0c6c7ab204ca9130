"""``echelon plan``: the plans of a cluster that fit and are fastest, and why."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from echelon.errors import ArgumentError
from echelon.planner.cluster import Cluster
from echelon.planner.layout import Recompute, ShardedStates
from echelon.planner.model_file import read_transformer
from echelon.planner.layout_space import SearchLimits
from echelon.planner.plan_search import PlannedLayout, SearchResult, search
from echelon.planner.software_stack import SoftwareStack, rates_of
from echelon.planner.transformer import Transformer

_ZERO = {
    ShardedStates.NOTHING: "",
    ShardedStates.OPTIMIZER: "optimizer",
    ShardedStates.GRADIENTS: "gradients",
    ShardedStates.PARAMETERS: "parameters",
}
_MOST_TERMS = 3


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The arguments of the command line, as they were written.

    Attributes:
        model: a file or folder that describes the model.
        cluster: a text or a file that describes the cluster.
        global_batch: sequences of a step.
        seq: tokens of a sequence; None: as many as the model's file says.
        fixed: axes that are given, each as ``pp=4``.
        max_memory_gib: GiB of a device that may be allocated.
        stack: the name of the fitted constants.
        best: how many plans are shown.
        explain: the number of a plan whose terms are shown.
        as_json: whether JSON is printed.
    """

    model: Path
    cluster: str
    global_batch: int
    seq: int | None
    fixed: Sequence[str]
    max_memory_gib: float | None
    stack: str
    best: int
    explain: int | None
    as_json: bool


def searched(
    request: PlanRequest,
) -> tuple[Transformer, Cluster, SoftwareStack, SearchLimits]:
    """What a request asks for: the model, the cluster, the constants and the limits."""
    model = read_transformer(request.model, request.seq)
    cluster = Cluster.parse(request.cluster)
    limits = SearchLimits(
        global_batch=request.global_batch,
        fixed=dict(_axis(text) for text in request.fixed),
        max_memory=None if request.max_memory_gib is None else request.max_memory_gib * 2**30,
        keep=max(request.best, request.explain or 1),
    )
    return model, cluster, SoftwareStack(name=request.stack, rates=rates_of(request.stack)), limits


def show(request: PlanRequest) -> int:
    """Print the best plans; returns 1 if none fits."""
    model, cluster, stack, limits = searched(request)
    result = search(model, cluster, stack, limits)
    if request.as_json:
        rows = [_record(model, cluster, planned) for planned in result.best]
        typer.echo(json.dumps({"num_layouts": result.num_layouts, "plans": rows}, indent=2))
        return 0 if rows else 1
    if not result.best:
        assert result.nearest is not None, "there are layouts, and none fits"
        typer.echo(f"None of {result.num_layouts} plans fits. The nearest one:")
        typer.echo(f"  {describe(result.nearest)}: {result.nearest.refusal()}")
        return 1
    if request.explain is not None:
        return _explain(model, cluster, result, request.explain)
    _table(model, cluster, result, request.best)
    return 0


def describe(planned: PlannedLayout) -> str:
    """The axes of a plan as text.

    An axis of length 1 is left out.
    """
    layout = planned.layout
    axes = ("tp", "cp", "ep", "pp", "dp", "shard")
    text = ",".join(f"{axis}={getattr(layout, axis)}" for axis in axes if getattr(layout, axis) > 1)
    if layout.sharded is not ShardedStates.NOTHING:
        text += f" ({_ZERO[layout.sharded]})"
    if layout.pp > 1:
        text += f" {layout.schedule_name}"
    if layout.chunks > 1:
        text += f" chunks={layout.chunks}"
    if layout.recompute is Recompute.BLOCKS:
        text += " recompute"
    return text or "one device"


def bound_by(planned: PlannedLayout) -> str:
    """The largest terms beside multiplications of matrices, with their parts of the step."""
    assert planned.time is not None, "only of a plan that fits"
    total = planned.time.total
    terms = sorted(planned.time.terms().items(), key=lambda item: -item[1])
    return ", ".join(
        f"{name} {seconds / total:.0%}"
        for name, seconds in [term for term in terms if term[0] != "matmul"][:_MOST_TERMS]
        if seconds / total >= 0.005
    )


def _axis(text: str) -> tuple[str, int | str]:
    name, _, value = text.partition("=")
    if name.strip() == "schedule":
        return "schedule", value.strip()
    if not (value.isascii() and value.isdigit()):
        raise ArgumentError(f"--fix is {text!r:.40}: give an axis and its length, such as pp=4")
    return name.strip(), int(value)


def _figures(model: Transformer, cluster: Cluster, planned: PlannedLayout) -> Mapping[str, float]:
    assert planned.time is not None, "only of a plan that fits"
    layout, seconds = planned.layout, planned.time.total
    tokens = layout.global_batch * model.seq / seconds
    flops = model.flops() * layout.global_batch / seconds / layout.num_ranks
    return {
        "step_s": seconds,
        "tokens_per_second": tokens,
        "mfu": flops / cluster.device.peak,
        "peak_gib": planned.memory.total / 2**30,
    }


def _record(model: Transformer, cluster: Cluster, planned: PlannedLayout) -> dict[str, object]:
    layout = planned.layout
    assert planned.time is not None, "only of a plan that fits"
    axes = ("tp", "cp", "ep", "pp", "chunks", "dp", "shard", "microbatch", "microbatches")
    return {
        "plan": describe(planned),
        **{axis: getattr(layout, axis) for axis in axes},
        "schedule": layout.schedule_name if layout.pp > 1 else None,
        "sharded": _ZERO[layout.sharded] or "nothing",
        "recompute": layout.recompute.value,
        **_figures(model, cluster, planned),
        "seconds": planned.time.terms(),
        "bytes": planned.memory.categories(),
    }


def _table(model: Transformer, cluster: Cluster, result: SearchResult, best: int) -> None:
    console = Console()
    console.print(
        f"{model.num_parameters / 1e9:.2f} B parameters on {cluster.num_devices} "
        f"{cluster.device.name}: {result.num_fitting} of {result.num_layouts} plans fit"
    )
    table = Table(box=None, header_style="bold")
    for name in ("", "plan", "batch", "step s", "tokens/s", "MFU", "GiB", "besides matrices"):
        is_text = name in ("plan", "besides matrices")
        table.add_column(name, justify="left" if is_text else "right")
    for number, planned in enumerate(result.best[:best], 1):
        figures = _figures(model, cluster, planned)
        layout = planned.layout
        table.add_row(
            str(number),
            describe(planned),
            f"{layout.microbatch}x{layout.microbatches}",
            f"{figures['step_s']:.3g}",
            f"{figures['tokens_per_second']:,.0f}",
            f"{figures['mfu']:.1%}",
            f"{figures['peak_gib']:.1f}",
            bound_by(planned),
        )
    console.print(table)


def _explain(model: Transformer, cluster: Cluster, result: SearchResult, number: int) -> int:
    if not 1 <= number <= len(result.best):
        raise ArgumentError(f"--explain is {number}; there are plans 1 to {len(result.best)}")
    planned = result.best[number - 1]
    assert planned.time is not None, "only what fits is among the best"
    figures = _figures(model, cluster, planned)
    typer.echo(f"plan {number}: {describe(planned)}, {figures['step_s']:.3f} s a step")
    for name, seconds in planned.time.terms().items():
        typer.echo(f"  {name:<12} {seconds:>10.4f} s {seconds / planned.time.total:>6.1%}")
    typer.echo(f"memory of stage {planned.memory.rank_stage}: {figures['peak_gib']:.2f} GiB")
    for name, nbytes in planned.memory.categories().items():
        typer.echo(f"  {name:<12} {nbytes / 2**30:>10.2f} GiB")
    return 0
