"""A worker that crashes costs a run of the tests one failure, and no time."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.children import environ

CONFTEST = """
def pytest_xdist_make_scheduler(config, log):
    from tests.crashed_workers import CrashedWorkers

    return CrashedWorkers(config, log)
"""
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_number(number):
    if number == {crash}:
        os._exit(1)
"""
ROOT = str(Path(__file__).parent.parent)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "crash"), [(0, 3), (3, 0), (7, 4)])
def test_every_other_test_runs_once_after_a_worker_has_crashed(
    tmp_path: Path, file: int, crash: int
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(8):
        text = TESTS.format(count=5, crash=crash if number == file else None)
        (tmp_path / f"test_{number}.py").write_text(text)
    command = ["-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    run = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env=environ(PYTHONPATH=ROOT),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "1 failed, 39 passed" in run.stdout, run.stdout
