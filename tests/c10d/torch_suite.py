"""Runs PyTorch's generic tests of backends on simulated ranks, on processes, and on gloo itself.

``python -m tests.c10d.torch_suite --world threads --ranks 4 --as gloo`` prints what passed, what
PyTorch leaves out, and what failed; the exit code is 1 if something failed that is not explained in
``suite_outcomes``. ``--world gloo`` runs them on torch's own gloo, for comparison.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

import echelon as ec
from tests.c10d import generic_suite
from tests.c10d.ranks import Ranks
from tests.c10d.suite_outcomes import Setting, reason_not_ours, sort

Outcomes = dict[str, set[str]]  # by test, of all ranks

RANKS_S = 60.0


def on_threads(size: int, backend: str, names: Sequence[str], folder: Path) -> Outcomes:
    """Each test in a world of simulated ranks of its own, so that a failure ends no other test."""
    generic_suite.prepare(size)
    return {name: _on_threads(size, backend, name, folder) for name in _known(names)}


def _on_threads(size: int, backend: str, name: str, folder: Path) -> set[str]:
    print(name, file=sys.stderr, flush=True)
    place = folder / name
    for each in ("barrier", "test_dir", "init_dir"):
        (place / each).mkdir(parents=True)
    try:
        return set(ec.run(_rank_on_threads, size, args=(backend, name, place), timeout=RANKS_S))
    except Exception as error:
        return {f"failed: {type(error).__name__}: {error}"}


def _rank_on_threads(world: ec.World, backend: str, name: str, folder: Path) -> str:
    store = dist.TCPStore("store of the tests", 1)
    generic_suite.setup(world.rank, world.size, store)
    return generic_suite.run_test(world.rank, world.size, str(folder), name, backend)


def on_processes(size: int, backend: str, names: Sequence[str], folder: Path) -> Outcomes:
    """All tests in the same processes, one after another."""
    for each in ("barrier", "test_dir", "init_dir"):
        (folder / each).mkdir()
    with Ranks(size, partial(generic_suite.prepare, size), generic_suite.setup) as ranks:
        wanted = _known(names, ranks.call(generic_suite.all_names)[0])
        of_ranks = ranks.call(
            generic_suite.run_suite, str(folder), wanted, backend, timeout_s=3600.0
        )
    return {name: {of_rank[name][0] for of_rank in of_ranks} for name in wanted}


def _known(names: Sequence[str], known: Sequence[str] = ()) -> list[str]:
    known = known or generic_suite.all_names(0, 0)
    parts = {*names} - {*known}
    return [
        name for name in known if not names or name in names or any(part in name for part in parts)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.c10d.torch_suite", description=__doc__)
    parser.add_argument("--world", choices=("threads", "processes", "gloo"), default="threads")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--as", dest="backend", choices=("echelon", "gloo"), default="echelon")
    parser.add_argument("names", nargs="*", help="names of tests, or parts of them")
    options = parser.parse_args(arguments)
    start_s = time.perf_counter()
    backend = "gloo" if options.world == "gloo" else options.backend
    setting = Setting(options.world, options.ranks, backend)
    with tempfile.TemporaryDirectory() as folder:
        if options.world == "threads":
            outcomes = on_threads(options.ranks, backend, options.names, Path(folder))
        else:
            served = generic_suite.OWN_GLOO if options.world == "gloo" else backend
            outcomes = on_processes(options.ranks, served, options.names, Path(folder))
    passed, left_out, failed = sort(outcomes, options.ranks)
    not_ours = {name: reason_not_ours(name, setting) for name in failed}
    for name, reason in not_ours.items():
        print(f"FAILED {name}" if reason is None else f"not ours: {name}: {reason}")
        print(*(f"  {each[:1500]}" for each in sorted(outcomes[name])), sep="\n")
    num_ours = sum(reason is None for reason in not_ours.values())
    print(
        f"{len(outcomes)} tests on {options.ranks} ranks: {len(passed)} passed, "
        f"{len(left_out)} left out by PyTorch, {num_ours} failed, "
        f"{len(failed) - num_ours} failed for a name; {time.perf_counter() - start_s:.0f} s"
    )
    return int(num_ours > 0)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an orderly end of torch takes seconds
