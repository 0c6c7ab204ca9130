"""Scripts of users that start torch for every rank; fast tests have one of each kind."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cli.test_stop_signals import job, pid_of
from tests.comm.test_start_facts import check_script_is_refused
from tests.test_slurm import check_requeued, trains_on


@pytest.mark.parametrize("number", [0, 1], ids=["tasks", "torchrun"])
def test_a_job_of_slurm_whose_time_is_over_is_requeued(
    number: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    check_requeued(number, tmp_path, trains_on(tmp_path_factory.mktemp("straight")))


@pytest.mark.parametrize("backend", ["None", "'gloo'", "'shm'"])
def test_ranks_with_other_numbers_of_threads_do_not_start(backend: str) -> None:
    check_script_is_refused(backend)


def test_a_second_signal_ends_a_rank_that_does_not_come_to_an_end(tmp_path: Path) -> None:
    with job(tmp_path, "stuck") as process:
        for _ in range(2):
            os.kill(pid_of(tmp_path, 0), signal.SIGTERM)
            time.sleep(2.0)  # sooner, the second would be taken for an echo of the first
        start_s = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert re.match(r"rank 0 .*was killed by SIGTERM", errors)
        assert process.returncode not in (0, 75)
        assert time.monotonic() - start_s < 20  # its handler before allows it some last words
    assert list(tmp_path.glob("saved-*")) == []
