"""One process holds the lock of a file, until it releases it, closes it or ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.process.file_lock import lock_file, unlock_file

HOLD = (
    "import os, sys; from echelon.process.file_lock import lock_file;"
    "lock_file(os.open(sys.argv[1], os.O_RDWR)); print(flush=True); input()"
)


def test_a_lock_that_is_held_is_refused_at_once_and_free_when_its_process_is_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lock"
    path.touch()
    descriptor = os.open(path, os.O_RDWR)
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(BlockingIOError):
            lock_file(descriptor)
        other.kill()
    lock_file(descriptor)
    os.close(descriptor)


def test_a_released_lock_is_free(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    lock_file(first)
    with pytest.raises(BlockingIOError):
        lock_file(second)
    unlock_file(first)
    lock_file(second)
    for descriptor in (first, second):
        os.close(descriptor)
