"""Some of PyTorch's generic tests of backends on simulated ranks, quickly.

``test_generic_suite`` runs all of them on processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# One for each kind of call.
NAMES = (
    "test_DistributedDataParallelCPU",
    "test_accumulate_gradients_no_sync_grad_is_view",
    "test_all_gather_coalesced_complex",
    "test_all_reduce_coalesced_full_group_sum",
    "test_all_to_all_single_unequal_split_group",
    "test_barrier_full_group",
    "test_batch_isend_irecv_gloo_tags",
    "test_gather_object_subgroup",
    "test_isend_torch_profiler",
    "test_monitored_barrier_gloo_subgroup",
    "test_scatter_object_list",
    "test_send_recv_any_source_torch_profiler",
    "test_sparse_all_reduce_sum",
)


@pytest.mark.slow
def test_a_dozen_of_pytorchs_tests_pass_on_simulated_ranks_told_that_they_run_on_gloo() -> None:
    options = ("--world", "threads", "--ranks", "4", "--as", "gloo")
    done = subprocess.run(
        [sys.executable, "-m", "tests.c10d.torch_suite", *options, *NAMES],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(NAMES)} passed, 0 left out by PyTorch, 0 failed" in done.stdout
