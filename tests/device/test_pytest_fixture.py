"""The fixture gives a test a device, and fails it where something races."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.compiler import needs_compiler

TESTS = """
import torch

pytest_plugins = ["echelon.testing.device.pytest_fixture"]

def use(waits):
    side, x = torch.cuda.Stream(), torch.zeros(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    return x.sum()

def test_waits(simulated_device):
    assert use(waits=True).item() == 4

def test_races(simulated_device):
    use(waits=False)

def test_nothing_is_left_patched():
    assert not torch.cuda.is_available()
"""


@needs_compiler
@pytest.mark.slow
def test_a_test_with_a_race_fails_with_the_report(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert "3 passed, 1 error" in ended.stdout  # at its end
    assert "read after write, in memory of 16 bytes" in ended.stdout
    assert "x.add_(1)" in ended.stdout
    assert "ERROR test_it.py::test_races" in ended.stdout
