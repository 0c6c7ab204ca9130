"""Simulated ranks under debugpy, as editors start it: its breakpoints, and no limit of time."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.laboratory.debugpy_client import DebugpyClient

pytest.importorskip("debugpy")

SCRIPT = """
import sys
import debugpy, torch
import echelon as ec

def main(world):
    total = torch.ones(1)
    if world.rank == 1:
        total += 1  # line 9
        {call}
        total += 1
    world.group.all_reduce(total)
    return total.item()

host, port = debugpy.listen(("127.0.0.1", 0))
print(port, flush=True)
debugpy.wait_for_client()
print(ec.run(main, 3, timeout=2), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lines", "call", "just_my_code"), [([9], "pass", False), ([], "breakpoint()", True)]
)
def test_a_rank_that_debugpy_has_stopped_is_not_late(
    tmp_path: Path, lines: list[int], call: str, just_my_code: bool
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.format(call=call))
    command = [sys.executable, "-Xfrozen_modules=off", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            with DebugpyClient(int(program.stdout.readline())) as client:
                client.attach(str(path), lines, just_my_code=just_my_code)
                stopped = client.event("stopped")
                frames = client.ask("stackTrace", threadId=stopped["threadId"])["stackFrames"]
                names = [frame["name"] for frame in frames if frame["source"]["path"] == str(path)]
                assert names[0] == "main"
                time.sleep(5)  # more than twice as long as a rank waits for another
                client.ask("continue", threadId=stopped["threadId"])
                assert program.stdout.readline() == "[5.0, 5.0, 5.0]\n"
                program.wait(30)
        finally:
            program.kill()
