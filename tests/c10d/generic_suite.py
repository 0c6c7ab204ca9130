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

BACKEND = "echelon"
GROUP_TIMEOUT_S = 10.0
STEP_TIMEOUT_S = 60.0

# Their bodies do nothing but for backends whose names they know.
BRANCH_ON_NAME = "test_accumulate_gradients_no_sync"

_kept: dict[str, Any] = {}


def prepare(size: int) -> None:
    """Import the backend and PyTorch's tests."""
    import echelon.c10d  # noqa: F401  # registers the backend

    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size))
    from torch.testing._internal.distributed import distributed_test

    os.environ["BACKEND"] = "mpi"  # or PyTorch skips subgroups in worlds of less than 8 ranks
    _kept["suite"] = distributed_test


def setup(rank: int, size: int, store: dist.Store) -> None:
    """Keep the store for ``run_suite``."""
    _kept["store"] = store


def all_names(rank: int, size: int) -> list[str]:
    """The names of all tests that PyTorch has."""
    base = _kept["suite"].DistributedTest._DistTestBase
    return [name for name in sorted(dir(base)) if name.startswith("test_")]


def run_suite(rank: int, size: int, folder: str, names: list[str]) -> dict[str, tuple[str, float]]:
    """Run tests of PyTorch; the outcome of each and its seconds."""
    suite, store = _kept["suite"], _kept["store"]
    os.environ.update(TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/init_method")
    instance = _instance(rank, size, folder)
    outcomes = {}
    for step, name in enumerate(names):
        if not dist.is_initialized():
            _init(rank, size, dist.PrefixStore(f"before {name}", store))
        suite.BACKEND = "gloo" if name.startswith(BRANCH_ON_NAME) else BACKEND
        start_s = time.perf_counter()
        outcome = _outcome(getattr(type(instance), name), instance)
        outcomes[name] = (outcome, time.perf_counter() - start_s)
        of_ranks = _exchange(store, f"step {step}", rank, size, outcome)
        if any(other.startswith("failed") for other in of_ranks) and dist.is_initialized():
            dist.destroy_process_group()  # the ranks may be at different places
            _exchange(store, f"step {step} destroyed", rank, size, "")
    if dist.is_initialized():
        dist.destroy_process_group()
    return outcomes


def _instance(rank: int, size: int, folder: str) -> Any:
    """A test case with all tests, whose barrier needs no processes of its own."""
    from torch.testing._internal.common_utils import TestCase

    store, count = _kept["store"], iter(range(10**6))

    def barrier(self: Any, *_: Any, **__: Any) -> None:
        _exchange(store, f"barrier {next(count)}", rank, size, "")

    base = _kept["suite"].DistributedTest._DistTestBase
    members = {"_barrier": barrier, "runTest": lambda self: None, "world_size": size}
    instance = type("Generic", (base, TestCase), members)()
    instance.rank, instance.file_name = rank, f"{folder}/init_file"
    return instance


def _init(rank: int, size: int, store: dist.Store) -> None:
    timeout = timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)


def _outcome(test: Callable[[Any], None], instance: Any) -> str:
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
    except Exception as error:
        return f"failed: {type(error).__name__}: {error}"
    return "passed"


def _exchange(store: dist.Store, key: str, rank: int, size: int, text: str) -> list[str]:
    """The texts of all ranks; a barrier that needs no process group."""
    store.set(f"{key}/{rank}", text)
    keys = [f"{key}/{other}" for other in range(size)]
    store.wait(keys, timedelta(seconds=STEP_TIMEOUT_S))
    return [store.get(key).decode() for key in keys]
