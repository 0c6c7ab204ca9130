"""Judges the planner on published runs: times, what fits, and the choice among plans.

    python benchmarks/planner.py                    # benchmarks/data/published_runs.csv
    python benchmarks/planner.py FILE.csv           # rows of anybody, with the same columns

Nothing is fitted here: the constants are those of ``src/echelon/planner/rates.json``. Beside each
error stands that of one FLOP rate, the best one for just these rows.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from published_runs import PATH, PublishedRun, error_line, timed_runs

from echelon.planner.layout import Recompute
from echelon.planner.software_stack import rates_of


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


def judge_choices(runs: Sequence[PublishedRun]) -> None:
    """For runs that differ in their plan alone: what choosing by prediction would have cost."""
    groups: dict[tuple[object, ...], list[PublishedRun]] = {}
    for run in runs:
        groups.setdefault(run.plan_group, []).append(run)
    by_source: dict[str, list[tuple[float, float]]] = {}
    for rows in groups.values():
        plans = plans_of(rows)
        if len(plans) < 3:
            continue
        times, real = zip(*plans, strict=True)
        chosen = min(plans)[1]
        by_source.setdefault(rows[0].source, []).append(
            (chosen / min(real) - 1, rank_correlation(times, real))
        )
    print(
        f"\n{'choice among plans':<30} {'groups':>6} {'regret':>8} {'worst':>8} {'rank corr.':>10}"
    )
    for source, pairs in by_source.items():
        regrets = [regret for regret, _ in pairs]
        print(
            f"{source:<30} {len(pairs):>6} {statistics.fmean(regrets):>8.1%} {max(regrets):>8.1%} "
            f"{statistics.fmean(corr for _, corr in pairs):>10.2f}"
        )


def main() -> None:
    """Read rows, and print the figures of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, default=PATH)
    timed = timed_runs(parser.parse_args().file)
    sources: dict[str, list[PublishedRun]] = {}
    for run in timed:
        sources.setdefault(run.source, []).append(run)
    print("time of a step")
    for source, rows in sources.items():
        print(error_line(source, [run.error(rates_of(run.stack_name)) for run in rows]))
        ratios = [flop_seconds(run) / run.step_s for run in rows if run.step_s]
        rate = statistics.median(1 / ratio for ratio in ratios)
        print(error_line("  one FLOP rate", [rate * ratio - 1 for ratio in ratios]))
    judge_choices(timed)


if __name__ == "__main__":
    main()
