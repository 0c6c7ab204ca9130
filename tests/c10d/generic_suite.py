"""Runs PyTorch's own generic tests of backends inside ranks that stay, one test after another.

PyTorch decides by decorators, when its module is imported, which tests a backend gets. We import it
as if for gloo, the backend for CPU tensors, and take no notice of what is marked as MPI's alone.
"""

import os
import time
import unittest
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from echelon.c10d.served_backends import new_process_group
from tests.c10d.profiler_names import lookup_of_gloo

BACKEND = "echelon"
OWN_GLOO = "torch's gloo"  # where we would serve what asks for gloo
GROUP_TIMEOUT_S = 10.0
STEP_TIMEOUT_S = 60.0

# Their bodies do nothing but for backends whose names they know.
BRANCH_ON_NAME = "test_accumulate_gradients_no_sync"

_kept: dict[str, Any] = {}


def prepare(size: int) -> None:
    """Import the backend and PyTorch's tests."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size))
    from torch.testing._internal.distributed import distributed_test

    if size > 2:  # subgroups are of ranks 1 and 2
        os.environ["BACKEND"] = "mpi"  # or PyTorch skips them in worlds of less than 8 ranks
    _kept["suite"] = distributed_test


def setup(rank: int, size: int, store: dist.Store) -> None:
    """Keep the store for ``run_suite``."""
    _kept.setdefault("stores", {})[rank] = store


def all_names(rank: int, size: int) -> list[str]:
    """The names of all tests that PyTorch has."""
    base = _kept["suite"].DistributedTest._DistTestBase
    return [name for name in sorted(dir(base)) if name.startswith("test_")]


def run_suite(
    rank: int, size: int, folder: str, names: list[str], backend: str = BACKEND
) -> dict[str, tuple[str, float]]:
    """Run tests of PyTorch, which is told that they run on a backend.

    Returns:
        the outcome of each, and its seconds.
    """
    suite, store = _kept["suite"], _kept["stores"][rank]
    backend = _tell(backend)
    os.environ.update(TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/init_method")
    instance = _instance(rank, size, folder)
    outcomes = {}
    for name in names:
        _init(rank, size, dist.PrefixStore(f"before {name}", store), backend)
        suite.BACKEND = "gloo" if name.startswith(BRANCH_ON_NAME) else backend
        start_s = time.perf_counter()
        outcome = _outcome(getattr(type(instance), name), instance)
        outcomes[name] = (outcome, time.perf_counter() - start_s)
        _exchange(store, f"after {name}", rank, size, "")
        if dist.is_initialized():
            dist.destroy_process_group()  # the ranks may be at different places
    return outcomes


def run_test(rank: int, size: int, folder: str, name: str, backend: str) -> str:
    """Run one test of PyTorch, in a world of its own: ``passed``, or why it was skipped.

    Raises:
        Exception: it has failed on this rank.
    """
    os.environ.update(TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/init_method")
    instance = _instance(rank, size, folder)
    backend = _tell(backend)
    _kept["suite"].BACKEND = "gloo" if name.startswith(BRANCH_ON_NAME) else backend
    _init(rank, size, _kept["stores"][rank], backend)
    outcome = _result(getattr(type(instance), name), instance)
    _exchange(_kept["stores"][rank], "the end", rank, size, "")
    return outcome


def _tell(backend: str) -> str:
    """Have groups of the backend be made, and its events be known; the name that tests are told."""
    if backend == OWN_GLOO:
        return "gloo"
    vars(distributed_c10d)["_new_process_group_helper"] = new_process_group
    suite = _kept["suite"]
    _kept.setdefault("lookup", suite.get_profiling_event)
    suite.get_profiling_event = lookup_of_gloo(_kept["lookup"])
    return backend


def _instance(rank: int, size: int, folder: str) -> Any:
    """A test case with all tests, whose barrier needs no processes of its own."""
    from torch.testing._internal.common_utils import TestCase

    store, count = _kept["stores"][rank], iter(range(10**6))

    def barrier(self: Any, *_: Any, **__: Any) -> None:
        _exchange(store, f"barrier {next(count)}", rank, size, "")

    base = _kept["suite"].DistributedTest._DistTestBase
    members = {"_barrier": barrier, "runTest": lambda self: None, "world_size": size}
    instance = type("Generic", (base, TestCase), members)()
    instance.rank, instance.file_name = rank, f"{folder}/init_file"
    return instance


def _init(rank: int, size: int, store: dist.Store, backend: str) -> None:
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def _outcome(test: Callable[[Any], None], instance: Any) -> str:
    try:
        return _result(test, instance)
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"


def _result(test: Callable[[Any], None], instance: Any) -> str:
    from torch.testing._internal.common_distributed import TEST_SKIPS
    from torch.testing._internal.common_utils import set_rng_seed

    reason = getattr(test, "__unittest_skip_why__", "")
    if reason and "MPI" not in reason:
        return f"skipped: {reason}"
    set_rng_seed()
    try:
        test(instance)
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except SystemExit as ended:
        return "skipped: " + {s.exit_code: s.message for s in TEST_SKIPS.values()}[ended.code]
    return "passed"


def _exchange(store: dist.Store, key: str, rank: int, size: int, text: str) -> list[str]:
    """The texts of all ranks; a barrier that needs no process group."""
    store.set(f"{key}/{rank}", text)
    keys = [f"{key}/{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=STEP_TIMEOUT_S))
    return [store.get(key).decode() for key in keys]
