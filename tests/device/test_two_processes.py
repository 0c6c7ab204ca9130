"""On two simulated devices, plans of torch have the numbers of one process, and nothing races."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device.compiler import needs_compiler
from tests.device.two_processes import PROGRAMS

pytestmark = [needs_compiler, pytest.mark.slow]
ROOT = Path(__file__).parents[2]


def on_two_ranks(name: str, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank had, by order."""
    command = [sys.executable, "-m", "tests.device.two_processes", str(folder), name]
    variables = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in range(2)
    ]
    ranks = [
        subprocess.Popen(
            command, cwd=ROOT, env=os.environ | each, stderr=subprocess.PIPE, text=True
        )
        for each in variables
    ]
    try:
        texts = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(texts)
    return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_two_ranks_have_the_losses_of_one_process_in_every_order(name: str, tmp_path: Path) -> None:
    wanted = PROGRAMS[name]("cpu", 1)
    close = pytest.approx(wanted, abs=1e-2 if "AMP" in name else 1e-6)
    for runs in on_two_ranks(name, tmp_path):
        assert [run["races"] for run in runs] == [[]] * 4
        assert runs[0]["losses"] == close
        assert all(run["losses"] == runs[0]["losses"] for run in runs)
        assert all(run["digests"] == runs[0]["digests"] for run in runs)
