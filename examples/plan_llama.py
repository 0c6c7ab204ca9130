"""Plans a Llama on a cluster that is not here, and prints why the best plan is the best.

::

    python examples/plan_llama.py 8b       Llama 3 8B on 8 H100
    python examples/plan_llama.py 405b     Llama 3.1 405B on 16,384 H100
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import echelon as ec

MODELS = Path(__file__).resolve().parent / "models"


@dataclass(frozen=True)
class Case:
    model: str
    cluster: str
    global_batch: int  # sequences of 8192 tokens
    axes: Literal["plan", "all"]


CASES = {
    "8b": Case("llama-3-8b.json", "8 H100", 64, "plan"),
    "405b": Case("llama-3-405b.json", "2048x8 H100 @ 3200 Gb/s", 2048, "all"),
}


def plans_of(case: Case, **fixed: int) -> ec.Plans:
    return ec.plan(
        MODELS / case.model,
        case.cluster,
        global_batch=case.global_batch,
        axes=case.axes,
        fixed=fixed,
    )


def why_not(case: Case, best_s: float, **fixed: int) -> str:
    """What the best plan with other axes takes, or why there is none."""
    try:
        plans = plans_of(case, **fixed)
    except ec.ArgumentError as error:
        return str(error)
    if not plans:
        return f"does not fit: {plans.refused[0]}"
    other = plans.best
    return f"{other.seconds / best_s - 1:+.1%} time: {other}, besides matrices {other.bounds()}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=CASES)
    case = CASES[parser.parse_args().model]
    plans = plans_of(case)
    best = plans.best
    print(f"{plans.num_fitting} of {plans.num_layouts} plans fit. The best:\n")
    print(best.explain())
    print("\nand why not otherwise:")
    layout = best.layout
    axes = ("tp", "cp", "pp", "shard", "chunks") if case.axes == "all" else ("pp", "shard")
    for axis in axes:
        # Without an axis that it has, and with one that it has not.
        length = 1 if getattr(layout, axis) > 1 else 2
        print(f"  {axis}={length}: {why_not(case, best.seconds, **{axis: length})}")
    print("\nThe nearest that do not fit:")
    for refused in plans.refused[:3]:
        print(f"  {refused}")


if __name__ == "__main__":
    main()
