"""Runs test files of PyTorch that use its threaded process group, on simulated ranks instead.

``python -m tests.c10d.threaded_suite FILE…`` takes files of ``pytorch/test/distributed``, which are
not part of this project. It runs the test cases that PyTorch runs on threads, once as PyTorch does
and once on simulated ranks, each in a process of its own, and prints the tests whose outcomes
differ; the exit code is 1 if there are any that pass only on PyTorch's own group. With
``--processes`` it takes the cases that PyTorch runs on processes with gloo, as those of DeviceMesh.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import unittest
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import (
    TEST_SKIPS,
    MultiProcessTestCase,
    MultiThreadedTestCase,
)

import echelon as ec

TIMEOUT_S = 120.0


def run_on_simulated_ranks() -> None:
    """Have the test cases of PyTorch start simulated ranks instead of threads and processes."""

    def spawn(self: Any) -> None:
        self.threads = [self]

    def join(cls: type, threads: list[Any], fn: object) -> None:
        (case,) = threads
        _run(case.world_size, _rank_main, cls, case._current_test_name)

    def join_processes(self: Any, fn: object) -> None:
        name = self._current_test_name()
        _run(self.world_size, _rank_of_processes, type(self), name, self.file_name)

    MultiThreadedTestCase._spawn_threads = spawn
    MultiThreadedTestCase._join_threads = classmethod(join)
    MultiProcessTestCase._spawn_processes = lambda self: None
    MultiProcessTestCase._join_processes = join_processes


def _run(size: int, rank_main: Callable[..., None], *args: Any) -> None:
    """Run a test on simulated ranks; it is skipped where they end with an exit code for that."""
    try:
        ec.run(rank_main, size, args=args, timeout=TIMEOUT_S)
    except SystemExit as ended:
        for skip in TEST_SKIPS.values():
            if skip.exit_code == ended.code:
                raise unittest.SkipTest(skip.message) from ended
        raise


def _rank_of_processes(world: ec.World, case_class: type, name: str, file_name: str) -> None:
    case: Any = case_class(name)
    case.rank, case.file_name = world.rank, file_name
    getattr(case, name)()


def _rank_main(world: ec.World, case_class: type, name: str) -> None:
    case: Any = case_class(name)
    case.rank = world.rank
    store = dist.TCPStore("store of the tests", 1)
    dist.init_process_group("gloo", rank=world.rank, world_size=world.size, store=store)
    case.perThreadSetUp()
    try:
        getattr(case, name)()
    finally:
        dist.destroy_process_group()
        case.perThreadTearDown()


_current_accelerator = torch.accelerator.current_accelerator


def _accelerator_or_cpu(*args: Any, **kwargs: Any) -> torch.device:
    """What files ask for while they are imported, some of which know no machine without any."""
    return _current_accelerator(*args, **kwargs) or torch.device("cpu")


class _Outcomes(unittest.TextTestResult):
    """The outcome of each test by its name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.of_tests: dict[str, str] = {}

    def _note(self, test: Any, outcome: str) -> None:
        self.of_tests[".".join(test.id().split(".")[-2:])] = outcome

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, f"skipped: {reason}")

    def addError(self, test: Any, err: Any) -> None:
        self._note(test, f"failed: {err[0].__name__}: {str(err[1])[-1500:]}")

    addFailure = addError


def run_file(path: str, part: str, kind: type) -> dict[str, str]:
    """The outcomes of a file's tests whose cases are of a kind."""
    sys.path.insert(0, os.path.dirname(path))
    name = os.path.basename(path).removesuffix(".py")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with mock.patch.object(torch.accelerator, "current_accelerator", _accelerator_or_cpu):
        spec.loader.exec_module(module)
    suite = unittest.TestSuite(
        case
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, kind)
        if value.__module__ == name
        for case in unittest.defaultTestLoader.loadTestsFromTestCase(value)
        if part in case.id()
    )
    runner = unittest.TextTestRunner(stream=sys.stderr, resultclass=_Outcomes)
    result = runner.run(suite)
    assert isinstance(result, _Outcomes)
    return result.of_tests


def compare(path: str, part: str, *options: str) -> int:
    """Run a file both ways and print what differs; how many tests pass only PyTorch's way."""
    outcomes: list[dict[str, str]] = []
    for way in ("own", "simulated"):
        start_s = time.perf_counter()
        command = [
            sys.executable,
            "-m",
            "tests.c10d.threaded_suite",
            "--one",
            way,
            "-k",
            part,
            *options,
            path,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            print(f"{path}: {way} ended with {done.returncode}\n{done.stderr[-3000:]}")
            return 1
        outcomes.append(json.loads(lines[-1]))
        counts = Counter(outcome.partition(":")[0] for outcome in outcomes[-1].values())
        seconds = time.perf_counter() - start_s
        print(f"{os.path.basename(path)}, {way}: {dict(counts)} in {seconds:.0f} s", flush=True)
    own, ours = outcomes
    lost = [test for test, outcome in own.items() if outcome == "passed" and ours[test] != "passed"]
    won = [test for test, outcome in own.items() if outcome != "passed" and ours[test] == "passed"]
    for test in lost:
        print(f"only PyTorch passes {test}\n  {ours[test][:1500]}")
    for test in won:
        print(f"only simulated ranks pass {test}\n  {own[test][:300]}")
    return len(lost)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line says; the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.c10d.threaded_suite", description=__doc__
    )
    parser.add_argument("--one", choices=("own", "simulated"), help="one way; outcomes as JSON")
    parser.add_argument("-k", dest="part", default="", help="a part of the names of tests")
    parser.add_argument(
        "--processes",
        action="store_const",
        const="--processes",
        help="what PyTorch runs on processes",
    )
    parser.add_argument("files", nargs="+")
    options = parser.parse_args(arguments)
    if options.one is None:
        more = [options.processes] if options.processes else []
        return int(sum(compare(path, options.part, *more) for path in options.files) > 0)
    if options.one == "simulated":
        run_on_simulated_ranks()
    (path,) = options.files
    kind = MultiProcessTestCase if options.processes else MultiThreadedTestCase
    outcomes = run_file(path, options.part, kind)
    print(json.dumps(outcomes))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # an orderly end of torch takes seconds
