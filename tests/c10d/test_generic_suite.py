"""PyTorch's generic tests of backends, ``torch.testing._internal.distributed.distributed_test``."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests.c10d import generic_suite
from tests.c10d.ranks import Ranks

# The smallest world in which no test is left out for its size; subgroups are of ranks 1 and 2.
SIZE = 4
# Tests that PyTorch itself would run on gloo, and why they say nothing about another backend.
NOT_OURS = {
    r"test_monitored_barrier_.*": "torch.distributed refuses it to all but gloo, by name",
    r"test_barrier_timeout_(full_)?group": "expects the words of gloo; test_process_group has ours",
    r"test_sparse_all_reduce_sum": "sparse tensors are refused; test_process_group shows how",
}
# Why PyTorch's own decorators leave a test out here: the whole reason, or its beginning.
LEFT_OUT_BY_PYTORCH = (
    "Need at least 2 CUDA devices",
    "Need at least 4 CUDA devices",
    "CUDA is not available.",
    "no torchvision",
    "https://github.com/pytorch/pytorch/issues/",  # broken everywhere
    "Test is failing, see https://github.com/pytorch/pytorch/",
    "Skipped due to flakiness",
    "Only Nccl supports ",
    "Only NCCL supports CUDA all_to_all",
    "Only NCCL backend supports high priority stream",
    "NCCL Batch Send Recv Only",
    "NCCL Send Recv Only",
    "Coalescing manager currently tests with NCCL only",
    "Test requires backend gloo to be one of {'nccl'}",
    "Requires file:// initialization method.",
)
# With torch 2.13.0. A lower number would mean that tests vanish in silence.
MIN_PASSED = 118


def is_not_ours(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in NOT_OURS)


def is_left_out(outcome: str) -> bool:
    return outcome.startswith(tuple(f"skipped: {reason}" for reason in LEFT_OUT_BY_PYTORCH))


@pytest.mark.slow
@pytest.mark.timeout(300)  # about 25 s on two free cores
def test_pytorchs_generic_backend_tests_pass_on_echelon(tmp_path: Path) -> None:
    for folder in ("barrier", "test_dir", "init_dir"):
        (tmp_path / folder).mkdir()
    with Ranks(SIZE, partial(generic_suite.prepare, SIZE), generic_suite.setup) as ranks:
        names = [name for name in ranks.call(generic_suite.all_names)[0] if not is_not_ours(name)]
        of_ranks = ranks.call(generic_suite.run_suite, str(tmp_path), names, timeout_s=250.0)
    outcomes = {name: {of_rank[name][0] for of_rank in of_ranks} for name in names}
    passed = [name for name in names if outcomes[name] == {"passed"}]
    left_out = [name for name in names if all(map(is_left_out, outcomes[name]))]
    assert {name: outcomes[name] for name in sorted({*names} - {*passed, *left_out})} == {}
    assert len(passed) >= MIN_PASSED
