"""Run cases by their seeds, or one case that was printed.

``python -m tests.generated --seeds 0:100 --technique fsdp --world threads`` runs a range in a
process of its own that is started again behind a seed that has crashed or hangs, and prints one
line for each failure. ``--case '{...}'`` runs one; ``--shrink`` makes what fails smaller first.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.generated.campaign import Outcome, run_one
from tests.generated.draw import draw_case
from tests.generated.shrink import program_of, shrink
from tests.generated.workers import run_range, worker


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--seeds", default="0:100", help="a seed, or first:last (not included)")
    parser.add_argument("--technique", choices=["fsdp", "ddp", "pipeline"])
    parser.add_argument("--world", choices=["threads", "processes", "gloo"], default="threads")
    parser.add_argument("--case", help="a case, as JSON, in place of seeds")
    parser.add_argument("--shrink", action="store_true", help="make what fails smaller")
    parser.add_argument("--seconds", type=float, help="begin no case after so many seconds")
    parser.add_argument("--log", help="a file that gets a line of JSON for each case")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        return show(json.loads(given.case), given.shrink)
    first, _, last = given.seeds.partition(":")
    seeds = range(int(first), int(last or int(first) + 1))
    if given.worker:
        worker(seeds, given.technique, given.world)
        return 0
    if len(seeds) == 1:
        return show(draw_case(seeds[0], given.technique, given.world), given.shrink)
    failures = run_range(seeds, given.technique, given.world, given.seconds, given.log)
    return int(bool(failures))


def show(case: dict, smaller: bool) -> int:
    """Run one case, make it smaller if it fails, and print a program that shows the failure."""
    outcome: Outcome = run_one(case)
    print(f"{outcome.kind}: {outcome.text}")
    if outcome.failed and smaller:
        case, outcome = shrink(case, outcome)
    print(outcome.trace)
    print(program_of(case, outcome))
    return int(outcome.failed)


if __name__ == "__main__":
    sys.exit(main())
