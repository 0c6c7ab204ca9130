"""How soon five classic hangs of torch.distributed programs are named: simulated ranks and gloo.

``python benchmarks/hangs.py`` runs each program of ``hanging_programs`` on 4 simulated ranks and on
4 processes with torch's own gloo, whose timeout is 10 s here and 30 minutes by default. It prints
the seconds until the first rank raises, and how many of the two lines that do not fit together the
message has.
"""

from __future__ import annotations

import argparse
import inspect
import os
import time
from collections.abc import Callable
from functools import partial

import torch
from hanging_programs import HANGS, main

import echelon as ec
from echelon.c10d.served_backends import OWN_VARIABLE

RANKS = 4
GLOO_TIMEOUT_S = 10.0


def lines_at_fault(hang: Callable[[], None]) -> tuple[int, ...]:
    """The lines of the file whose comments say that ranks hang there."""
    source, start = inspect.getsourcelines(hang)
    lines = [
        start + i for i, line in enumerate(source) if "# hangs" in line or "# and here" in line
    ]
    if len(lines) == 1 or hang.__name__ != "early_return":
        return tuple(lines)
    text, first = inspect.getsourcelines(main)  # where the rank that has returned leaves the job
    left = next(first + i for i, line in enumerate(text) if "destroy_process_group" in line)
    return (left, lines[-1])


def first_failure(world: ec.World, name: str, own: bool, seconds: float) -> tuple[float, str]:
    """Run one program on a rank: the seconds until it raised, and what."""
    torch.set_num_threads(1)
    if own:
        os.environ.update({OWN_VARIABLE: "1", "GLOO_SOCKET_IFNAME": "lo"})
    start_s = time.perf_counter()
    try:
        main(name, seconds)
    except Exception as error:
        return time.perf_counter() - start_s, str(error)
    return float("inf"), ""


def measure(hang: Callable[[], None], own: bool) -> tuple[float, str]:
    """The seconds until the first failure on any rank, and its text."""
    if own:
        rank_main = partial(first_failure, name=hang.__name__, own=True, seconds=GLOO_TIMEOUT_S)
        start_s = time.perf_counter()
        try:
            return min(ec.run(rank_main, RANKS, "processes", timeout=120.0))
        except ec.RankFailed as error:  # gloo ends the process where lengths differ
            return time.perf_counter() - start_s, str(error)
    start_s = time.perf_counter()
    try:
        ec.run(lambda world: main(hang.__name__, 1800.0), RANKS)
    except Exception as error:
        return time.perf_counter() - start_s, str(error)
    return float("inf"), ""


def report() -> None:
    """Measure all programs and print a row for each."""
    print(f"{'hang':22} {'simulated':>10} {'lines':>6} {'gloo':>8} {'lines':>6}")
    for hang in HANGS:
        places = lines_at_fault(hang)
        row = f"{hang.__name__:22}"
        for own in (False, True):
            seconds, text = measure(hang, own)
            named = sum(f"hanging_programs.py:{line} " in text for line in places)
            row += f" {seconds:8.2f} s {named}/{len(places):>3}"
        print(row, flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    report()
