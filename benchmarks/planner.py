"""Judges the planner on published runs: times, what fits, and the choice among plans.

    python benchmarks/planner.py                    # benchmarks/data/published_runs.csv
    python benchmarks/planner.py FILE.csv           # rows of anybody, with the same columns
    python benchmarks/planner.py --noise 0.032      # and what noise leaves of an exact prediction

Nothing is fitted here: the constants are those of ``src/echelon/planner/rates.json``. Beside each
error stands that of one FLOP rate, the best one for just these rows.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

from published_runs import PATH, PublishedRun, described_rows, error_line

from echelon.checks import number
from echelon.errors import ArgumentError
from echelon.planner.layout import Recompute
from echelon.planner.software_stack import rates_of

_DRAWS = 200  # of noisy times for each group of plans
_MOST_REASONS = 20  # that are printed


def predicted(run: PublishedRun) -> float:
    """Seconds of a step, with the constants of the row's software."""
    return run.predicted_s(rates_of(run.stack_name))


def flop_seconds(run: PublishedRun) -> float:
    """Seconds of a step at the peak of the device, recomputation included."""
    passes = 4 / 3 if run.layout.recompute is Recompute.BLOCKS else 1.0
    flops = run.model.flops() * run.layout.global_batch * passes
    return flops / (run.layout.num_ranks * run.cluster.device.peak)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: that of the ranks, of which equal values have their mean; 0 if all are equal."""
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    return statistics.correlation(_ranks(a), _ranks(b))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def plans_of(runs: Sequence[PublishedRun]) -> list[tuple[float, float]]:
    """Predicted and published seconds of each plan; of one that ran more than once, the mean."""
    by_plan: dict[object, list[PublishedRun]] = {}
    for run in runs:
        by_plan.setdefault((run.layout, run.blocks), []).append(run)
    return [
        (predicted(rows[0]), statistics.fmean(run.step_s or 0.0 for run in rows))
        for rows in by_plan.values()
    ]


def choice_groups(runs: Sequence[PublishedRun]) -> dict[str, list[list[tuple[float, float]]]]:
    """By source: for runs that differ in their plan alone, the two times of each of the plans."""
    groups: dict[tuple[object, ...], list[PublishedRun]] = {}
    for run in runs:
        groups.setdefault(run.plan_group, []).append(run)
    by_source: dict[str, list[list[tuple[float, float]]]] = {}
    for rows in groups.values():
        plans = plans_of(rows)
        if len(plans) >= 3:
            by_source.setdefault(rows[0].source, []).append(plans)
    return by_source


def choice_of(plans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Of predicted and published seconds of plans: the regret, and the rank correlation.

    Example:
        >>> choice_of([(1.0, 1.2), (2.0, 1.0), (3.0, 3.0)])
        (0.19999999999999996, 0.5)
    """
    times, real = zip(*plans, strict=True)
    return min(plans)[1] / min(real) - 1, rank_correlation(times, real)


def exact_choice(
    groups: Sequence[Sequence[tuple[float, float]]], noise: float
) -> tuple[float, float]:
    """Mean regret and rank correlation of a prediction without any error, were times so noisy.

    Args:
        noise: standard deviation of the logarithm of a published time. The true times are taken
            to be the predicted ones.
    """
    draw = random.Random(0)
    pairs = [
        choice_of([(time, time * math.exp(draw.gauss(0.0, noise))) for time, _ in plans])
        for _ in range(_DRAWS)
        for plans in groups
    ]
    regrets, correlations = zip(*pairs, strict=True)
    return statistics.fmean(regrets), statistics.fmean(correlations)


def judge_choices(runs: Sequence[PublishedRun], noise: float) -> None:
    """For runs that differ in their plan alone: what choosing by prediction would have cost."""
    print(
        f"\n{'choice among plans':<30} {'groups':>6} {'regret':>8} {'worst':>8} {'rank corr.':>10}"
    )
    for source, groups in choice_groups(runs).items():
        pairs = [choice_of(plans) for plans in groups]
        regrets = [regret for regret, _ in pairs]
        print(
            f"{source:<30} {len(pairs):>6} {statistics.fmean(regrets):>8.1%} {max(regrets):>8.1%} "
            f"{statistics.fmean(corr for _, corr in pairs):>10.2f}"
        )
        if noise:
            regret, correlation = exact_choice(groups, noise)
            name = f"  exact, noise of {noise:.1%}"
            print(f"{name:<30} {'':>6} {regret:>8.1%} {'':>8} {correlation:>10.2f}")


def main() -> None:
    """Read rows, and print the figures of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PATH)
    parser.add_argument(
        "--noise", type=float, default=0.0, help="of the published times, as a part: 0.032"
    )
    arguments = parser.parse_args()
    try:
        number("--noise", arguments.noise, 0.0, 1.0)
        runs, refused = described_rows(arguments.file)
    except ArgumentError as error:
        parser.error(str(error))
    timed = [run for run in runs if not run.not_judged]
    sources: dict[str, list[PublishedRun]] = {}
    for run in timed:
        sources.setdefault(run.source, []).append(run)
    print("time of a step")
    for source, rows in sources.items():
        print(error_line(source, [run.error(rates_of(run.stack_name)) for run in rows]))
        ratios = [flop_seconds(run) / run.step_s for run in rows if run.step_s]
        rate = statistics.median(1 / ratio for ratio in ratios)
        print(error_line("  one FLOP rate", [rate * ratio - 1 for ratio in ratios]))
    judge_choices(timed, arguments.noise)
    refused += [(run.key, run.not_judged) for run in runs if run.not_judged]
    print_reasons(refused)


def print_reasons(refused: Sequence[tuple[str, str]]) -> None:
    """Why rows are not judged, each reason once with how many rows it keeps out."""
    if not refused:
        return
    rows_of = dict[str, list[str]]()
    for key, reason in refused:
        rows_of.setdefault(reason, []).append(key)
    print(f"\nnot judged: {len(refused)} rows")
    for reason, keys in list(rows_of.items())[:_MOST_REASONS]:
        print(f"{len(keys):>6}, the first is {keys[0]:.40}: {reason}")
    if len(rows_of) > _MOST_REASONS:
        print(f"  and {len(rows_of) - _MOST_REASONS} other reasons")


if __name__ == "__main__":
    main()
