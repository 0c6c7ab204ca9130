"""Jobs of two and three ranks on simulated devices: right numbers, no races, no wait too many."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.device.compiler import needs_compiler

pytestmark = [needs_compiler, pytest.mark.slow, pytest.mark.timeout(400)]
# Asked for by a rank that does not wait: what it learns is only that a send is over.
COVERED = {
    "pipeline/link.py, PendingSend.is_done.<locals>.<genexpr>: "
    "return (self._is_poll_cheap or poll) and all(work.done() for work in self._works)"
}


def lines_of_ranks(ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What the ranks of a job have written."""
    command = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.device.ranks", str(folder)],
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    files = [folder / f"rank{rank}.jsonl" for rank in range(ranks)]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert not done.returncode, [line["problem"] for line in lines if line.get("problem")]
    return lines


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_have_the_numbers_of_one_process_and_no_races(ranks: int, tmp_path: Path) -> None:
    lines = lines_of_ranks(ranks, tmp_path)
    assert {line["problem"] for line in lines if "program" in line} == {""}
    # A wait counts as found if it is on any rank: the ranks of a pipeline do different things.
    waits = {line["wait"] for line in lines if "wait" in line}
    found = {line["wait"] for line in lines if line.get("found")}
    assert waits - found == (COVERED if ranks == 2 else set())
    assert len(found) >= (15 if ranks == 2 else 0)
