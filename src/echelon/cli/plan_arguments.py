"""The command ``echelon plan`` and its options; what it does is in ``plan_command``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echelon.cli.output import refusing
from echelon.errors import ArgumentError

if TYPE_CHECKING:
    from echelon.planner.software_stack import MeasuredCluster

_Model = Annotated[
    Path | None, typer.Argument(help="A JSON with sizes, or a config.json, or its folder.")
]
_Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGUMENTS]...", help="For the script of --check, after --."),
]
_Cluster = Annotated[
    str | None,
    typer.Option(help="Hosts x devices, such as '8x8 H100 @ 3200 Gb/s', or a JSON file."),
]
_Measure = Annotated[
    int | None,
    typer.Option(min=1, help="Instead of --cluster: so many ranks here, measured for 30 s."),
]
_GlobalBatch = Annotated[int | None, typer.Option(min=1, help="Sequences of a step.")]
_Seq = Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")]
_Fix = Annotated[
    list[str] | None,
    typer.Option(help="What is given: pp=4 or schedule=zb-v; may be given several times."),
]
_MaxMemory = Annotated[float | None, typer.Option(help="GiB of a device that may be allocated.")]
_Goal = Annotated[str, typer.Option(help="What is best: tokens/s, cost or memory.")]
_Price = Annotated[
    float | None, typer.Option(help="Of a device for an hour, for the cost of tokens.")
]
_Axes = Annotated[str, typer.Option(help="plan: what an ec.Plan says; or all, with tp, cp and ep.")]
_Stack = Annotated[str, typer.Option(help="The software whose constants are used.")]
_Best = Annotated[int, typer.Option(min=1, help="How many plans are shown.")]
_Refused = Annotated[int, typer.Option(min=0, help="How many plans that do not fit are shown.")]
_Explain = Annotated[int | None, typer.Option(help="Show the terms of this plan, and its ec.Plan.")]
_Scale = Annotated[str, typer.Option(help="The best plan for each number of devices: 8,16,32.")]
_Mtbf = Annotated[float | None, typer.Option(min=0, help="Hours between failures of one host.")]
_SaveRate = Annotated[float | None, typer.Option(min=0, help="GB that one host saves in a second.")]
_Restart = Annotated[
    float, typer.Option(min=0, help="Minutes from a failure until training goes on.")
]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Check = Annotated[
    str | None,
    typer.Option(help="Run the first steps of this script without values: does it fit?"),
]
_Html = Annotated[Path | None, typer.Option(help="Write a page with all of it here.")]

_CHECKED = {"check", "cluster", "fix", "max_memory", "model", "arguments"}  # used by --check
_OF_FAILURES = {"save_rate", "restart"}
_OF_TABLE = {"best", "refused", "explain", "html", "goal", "price"}


@refusing(ArgumentError)
def plan_with(
    context: typer.Context,
    model: _Model = None,
    arguments: _Arguments = None,
    cluster: _Cluster = None,
    measure: _Measure = None,
    global_batch: _GlobalBatch = None,
    seq: _Seq = None,
    fix: _Fix = None,
    max_memory: _MaxMemory = None,
    goal: _Goal = "tokens/s",
    price: _Price = None,
    axes: _Axes = "plan",
    stack: _Stack = "fsdp",
    best: _Best = 10,
    refused: _Refused = 0,
    explain: _Explain = None,
    scale: _Scale = "",
    mtbf: _Mtbf = None,
    save_rate: _SaveRate = None,
    restart: _Restart = 10.0,
    as_json: _AsJson = False,
    html: _Html = None,
    check: _Check = None,
) -> int:
    """Find the plans that fit a cluster that is not here, and the best of them.

    Exit code 1: no plan fits, and the nearest ones are named, or the script of --check does not.
    """
    from echelon.cli import plan_command, what_if_command

    _check_options(context)
    fixed = fix or []
    if check is not None and cluster is not None:
        from echelon.cli import script_check_command  # which brings torch

        words = [*([] if model is None else [str(model)]), *(arguments or [])]
        return script_check_command.show(check, words, cluster, fixed, max_memory)
    if model is None or global_batch is None or arguments or check is not None:
        raise typer.BadParameter("give one MODEL and --global-batch, or --check and a script")
    failures = what_if_command.failures_of(mtbf, save_rate, restart)
    space = plan_command.searched(
        model,
        _measured(measure) if cluster is None else cluster,
        global_batch=global_batch,
        seq=seq,
        price=price,
        axes=axes,
        stack=stack,
        fixed=fixed,
        max_memory_gib=max_memory,
        keep=max(best, explain or 1),
    )
    if scale or failures is not None:
        return what_if_command.show(space, scale, failures, as_json=as_json)
    return plan_command.show(space, goal, best, refused, explain, html, as_json=as_json)


def _check_options(context: typer.Context) -> None:
    """Refuse options that contradict or would do nothing beside the others."""
    options = {str(param.name): param.opts[0] for param in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in options}
    given = {name for name, source in sources.items() if source and source.name == "COMMANDLINE"}
    if ("cluster" in given) == ("measure" in given):
        raise typer.BadParameter("give --cluster, or --measure and a number of ranks")
    if "check" in given:
        inert, situation = given - _CHECKED, "--check"
    elif "mtbf" not in given and given & _OF_FAILURES:
        inert, situation = given & _OF_FAILURES, "no --mtbf"
    elif given & {"scale", "mtbf"}:
        inert, situation = given & _OF_TABLE, "--scale or --mtbf"
    elif "as_json" in given:
        inert, situation = given & {"explain"}, "--json, which has all terms of each plan"
    else:
        return
    for name in sorted(inert):
        raise typer.BadParameter(f"{options[name]} does nothing with {situation}: leave it out")


def _measured(ranks: int | None) -> MeasuredCluster:
    from echelon.planner.measured_cluster import measure_cluster  # which brings torch

    assert ranks is not None, "there is no cluster"
    return measure_cluster(ranks)
