"""Fits the constants of the planner's software stacks to published runs.

    python benchmarks/fit_planner.py            # writes src/echelon/planner/rates.json
    python benchmarks/fit_planner.py --held-out # fits on halves and on other sources, and judges

Every constant has a value that is plausible before any run is seen, and a range; a fit moves away
from it only as far as the runs demand (a Gaussian prior of the logarithm).
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from planner import flop_seconds
from published_runs import STACKS, PublishedRun, error_line, timed_runs

from echelon.planner.software_stack import Rates

PATH = Path(__file__).parent.parent / "src" / "echelon" / "planner" / "rates.json"
NOISE = 0.05  # of published times: equal runs differ by 1 to 16 %
ROBUST = 2.0  # in units of the noise: beyond it, an error counts by its size, not by its square
ENOUGH = 200  # a source with more rows counts as much as one with so many

# The value of each constant before the fit, and the standard deviation of its logarithm.
PRIORS = {
    "matmul": (0.92, 0.10),
    "waves": (0.7, 0.5),
    "kernel_s": (4e-6, 0.5),
    "launch_s": (15e-6, 0.5),
    "memory": (0.75, 0.20),
    "attention": (0.65, 0.3),
    "scores": (0.35, 0.4),
    "score_passes": (5.0, 0.4),
    "block_passes": (14.0, 0.3),
    "ffn_passes": (3.0, 0.3),
    "logit_bytes": (16.0, 0.4),
    "bus": (0.9, 0.15),
    "latency_s": (17e-6, 0.5),
    "network": (0.8, 0.25),
    "network_latency_s": (10e-6, 0.6),
    "message": (0.5, 0.7),
    "contention": (0.25, 0.5),
    "optimizer": (0.7, 0.3),
    "drift": (0.01, 0.7),
    "step_s": (4e-3, 0.7),
}
NAMES = tuple(PRIORS)
START = np.array([math.log(PRIORS[name][0]) for name in NAMES])
SPREAD = np.array([PRIORS[name][1] for name in NAMES])


def rates_at(logarithms: np.ndarray) -> Rates:
    """The constants whose logarithms these are."""
    return Rates(**{name: math.exp(x) for name, x in zip(NAMES, logarithms, strict=True)})


def errors_of(runs: Sequence[PublishedRun], rates: Rates) -> np.ndarray:
    """The error of each row."""
    return np.array([run.error(rates) for run in runs])


def fit(runs: Sequence[PublishedRun]) -> Rates:
    """The constants of largest posterior density, by Levenberg and Marquardt's method."""
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.source] = counts.get(run.source, 0) + 1
    weights = np.array([min(1.0, ENOUGH / counts[run.source]) ** 0.5 for run in runs])

    def residuals(x: np.ndarray) -> np.ndarray:
        error = np.log1p(errors_of(runs, rates_at(x))) / NOISE
        size = np.abs(error)
        beyond = np.sign(error) * np.sqrt(np.maximum(2 * ROBUST * size - ROBUST**2, 0.0))
        error = np.where(size < ROBUST, error, beyond)
        return np.concatenate([weights * error, (x - START) / SPREAD])

    x, damping = START.copy(), 1e-2
    at = residuals(x)
    for _ in range(60):
        slopes = np.stack([(residuals(x + 1e-3 * unit) - at) / 1e-3 for unit in np.eye(len(x))], 1)
        normal, gradient = slopes.T @ slopes, slopes.T @ at
        for _ in range(10):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            step = np.clip(step, -0.5, 0.5)
            then = residuals(x + step)
            if then @ then < at @ at:
                break
            damping *= 4
        else:
            return rates_at(x)
        gain = 1 - (then @ then) / (at @ at)
        x, at, damping = x + step, then, max(damping / 3, 1e-6)
        if gain < 1e-4:
            break
    return rates_at(x)


def stacks_of(runs: Sequence[PublishedRun]) -> dict[str, list[PublishedRun]]:
    """The rows that each stack is fitted to: its own, and all of its kind for the general ones."""
    by_stack: dict[str, list[PublishedRun]] = {}
    for run in runs:
        by_stack.setdefault(run.stack_name, []).append(run)
    fused = [run for run in runs if run.overlaps_reduction]
    by_stack["fsdp"] = [run for run in fused if run.layout.sharded.value >= 2]
    by_stack["megatron"] = [run for run in runs if STACKS[run.source] in ("megatron", "vtrain")]
    return by_stack


def held_out(runs: Sequence[PublishedRun]) -> None:
    """Judge on rows that the fit has not seen: the other half of a source, and whole sources."""
    sources: dict[tuple[str, str], list[PublishedRun]] = {}
    for run in runs:
        kind = run.cluster.device.name.split("-")[0]
        sources.setdefault((run.source, kind), []).append(run)
    print("half of each source held out, three times")
    for (source, kind), rows in sources.items():
        if len(rows) < 20:
            continue
        errors = []
        for seed in range(3):
            shuffled = random.Random(seed).sample(rows, len(rows))
            half = len(rows) // 2
            errors.append(errors_of(shuffled[half:], fit(shuffled[:half])))
        print(error_line(f"{source} {kind}", np.concatenate(errors)), flush=True)
    print("each source left out whole, and the FLOP rate of the others of its devices")
    means = []
    for (source, kind), rows in sources.items():
        others = [run for run in runs if run.source != source]
        errors = errors_of(rows, fit(others))
        means.append(float(np.mean(np.abs(errors))))
        print(error_line(f"{source} {kind}", errors), flush=True)
        same = [run for run in others if run.cluster.device.name.startswith(kind)] or others
        print(error_line("  one FLOP rate", flop_errors(rows, same)), flush=True)
    print(f"mean over the sources: {np.mean(means):.1%}")


def flop_errors(rows: Sequence[PublishedRun], others: Sequence[PublishedRun]) -> np.ndarray:
    """The errors of one FLOP rate: the median over the sources of ``others`` of their medians."""
    by_source: dict[str, list[float]] = {}
    for run in others:
        by_source.setdefault(run.source, []).append((run.step_s or 0.0) / flop_seconds(run))
    slowness = np.median([np.median(ratios) for ratios in by_source.values()])
    return np.array([slowness * flop_seconds(run) / (run.step_s or 0.0) - 1 for run in rows])


def main() -> None:
    """Fit, judge and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--held-out", action="store_true", help="judge fits on unseen rows")
    arguments = parser.parse_args()
    runs = timed_runs()
    if arguments.held_out:
        held_out(runs)
        return
    fitted = {}
    for name, rows in sorted(stacks_of(runs).items()):
        rates = fit(rows)
        print(error_line(name, errors_of(rows, rates)))
        fitted[name] = {key: float(f"{value:.4g}") for key, value in asdict(rates).items()}
    note = "Written by benchmarks/fit_planner.py from benchmarks/data/published_runs.csv."
    PATH.write_text(json.dumps({"note": note, "stacks": fitted}, indent=2) + "\n")


if __name__ == "__main__":
    main()
