"""Who holds the lock of a folder of checkpoints."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon as ec
from echelon.errors import CheckpointError

SAVES = {"save": ec.save, "async_save": ec.async_save}


HOLD = (
    "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); input()"
)


def test_a_save_of_another_process_is_waited_for_by_nobody_and_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ec.save(tmp_path, step=1, model=model)
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for saving in SAVES.values():
            with pytest.raises(CheckpointError, match="another save into this folder is under way"):
                saving(tmp_path, step=2, model=model)
        other.send_signal(signal.SIGKILL)
    ec.save(tmp_path, step=2, model=model)
    assert ec.steps(tmp_path) == [1, 2]


@pytest.mark.slow
def test_a_fork_does_not_keep_the_lock_of_a_job_that_was_killed(tmp_path: Path) -> None:
    reader, writer = os.pipe()  # the fork lives until nobody holds the writing end

    def job() -> None:
        os.close(writer)
        ec.async_save(tmp_path, step=1, value=torch.zeros(30_000_000))
        while not list(tmp_path.glob(".saving-*")):
            time.sleep(0.001)
        if os.fork() == 0:
            os.read(reader, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)

    if not (pid := os.fork()):
        job()
    try:
        os.waitpid(pid, 0)
        start_s = time.monotonic()
        ec.save(tmp_path, step=2, value=1)
        assert time.monotonic() - start_s < 10  # the fork lives on
        assert ec.steps(tmp_path)[-1] == 2
    finally:
        os.close(reader)
        os.close(writer)
