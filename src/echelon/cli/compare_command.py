"""``echelon compare``: compares what a script defines, with plans or with its own loop."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from echelon.cli.output import say
from echelon.cli.schedule_command import write_files
from echelon.cli.script_errors import telling_errors_of_script
from echelon.errors import ArgumentError
from echelon.laboratory.compare import compare
from echelon.laboratory.comparison import Comparison
from echelon.launch.program import Program
from echelon.page import page, section
from echelon.plans.axes import axes_of
from echelon.plans.plans import Plan

_NEEDED = {
    "make_model": "a function that returns a new model",
    "batches": "a list with one batch for each step",
    "loss_fn": "a function of output and target",
    "optimizer": "a function of parameters that returns an optimizer",
}


def show(
    script: str,
    plans: Sequence[str],
    microbatches: int | None,
    html: Path | None,
    *,
    ranks: int | None,
    **options: Any,
) -> int:
    """Print what each comparison found; returns 1 if one of them is not the same.

    Args:
        plans: texts such as ``"pp=2,shard=2"``; without any, what the script has is compared.
        microbatches: of plans with stages; None for twice as many as stages.
        html: where a page is written; None for no page.
        ranks: how many train by the function of the script; None for its default.
        options: of ``ec.compare``.

    Raises:
        ArgumentError: the script lacks a name, or a comparison is refused.
    """
    results = []
    with telling_errors_of_script():
        names = _names_in(script)
        targets: Iterator[Any] = (_plan_of(text, microbatches) for text in plans)
        for target in targets if plans else _targets(script, names):
            is_plan = isinstance(target, Plan)
            of_target = {"units": names.get("units")} if is_plan else {"ranks": ranks}
            results.append(_compared(names, target, **of_target, **options))
            say(results[-1])
    write_files({"html": html}, lambda form: _page(script, results), "the comparison")
    return 0 if all(result.same for result in results) else 1


def _page(script: str, results: Sequence[Comparison]) -> str:
    body = [section(result.what, "", result._repr_html_()) for result in results]
    return page(f"{Path(script).name} compared with one process", "in float64", body)


def _names_in(script: str) -> Mapping[str, Any]:
    """What a script defines; it is run under another name than ``__main__``."""
    program = Program(script)
    if (problem := program.problem()) is not None:
        raise ArgumentError(problem)
    sys.path.insert(0, program.folder())
    try:
        names = runpy.run_path(script, run_name="__compared__")
    finally:
        sys.path.remove(program.folder())
    for name, what in _NEEDED.items():
        if name not in names:
            raise ArgumentError(
                f"{script} does not define {name}: write {what} of this name at its top level"
            )
    return names


def _targets(script: str, names: Mapping[str, Any]) -> list[Any]:
    """The plan and the function of a script, which are compared with one process."""
    targets = [names[name] for name in ("plan", "train") if name in names]
    if not targets:
        raise ArgumentError(
            f"{script} defines neither train, a function of (world, model, batches, "
            "optimizer), nor plan, an ec.Plan: write one, or give --plan"
        )
    return targets


def _plan_of(text: str, microbatches: int | None) -> Plan:
    axes, options = axes_of(text), dict[str, Any]()
    if axes.get("pp", 1) > 1:
        options["microbatches"] = microbatches or 2 * axes["pp"]
    if axes.get("shard", 1) > 1:
        options["fsdp"] = {"min_num_params": 0}  # models to compare are small
    return Plan.parse(text, **options)


def _compared(names: Mapping[str, Any], target: Any, **options: Any) -> Comparison:
    batches = names["batches"]
    return compare(
        names["make_model"],
        batches() if callable(batches) else batches,
        target,
        loss_fn=names["loss_fn"],
        optimizer=names["optimizer"],
        **options,
    )
