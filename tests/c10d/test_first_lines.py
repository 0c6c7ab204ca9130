"""The first line of a failure of a torch.distributed program names the rank that is at fault.

``tests/long/torch_hangs.py`` draws as many of these programs as one likes.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.long.torch_hangs import Scenario, first_line, is_right

ALL, PAIR = (0, 1, 2), (1, 2)

SCENARIOS = [
    Scenario("hang", "threads", 3, 1, PAIR, "all_gather"),
    Scenario("hang", "processes", 3, 1, PAIR, "all_reduce"),
    Scenario("late", "processes", 2, 0, (0, 1), "barrier"),
    Scenario("exit", "processes", 3, 2, PAIR, "all_to_all"),
    Scenario("exit", "threads", 3, 2, PAIR, "ring"),
    Scenario("raise", "processes", 3, 2, PAIR, "reduce_scatter"),
    Scenario("shape", "processes", 3, 2, ALL, "all_reduce"),
    Scenario("kill", "processes", 3, 1, PAIR, "ring"),
    Scenario("order", "processes", 3, 1, ALL, "barrier"),
    Scenario("order", "threads", 3, 1, PAIR, "all_reduce"),
    Scenario("groups", "processes", 3, 1, ALL, "barrier"),
    pytest.param(Scenario("hang", "launched", 3, 1, PAIR, "all_reduce"), marks=pytest.mark.slow),
    pytest.param(Scenario("exit", "launched", 3, 1, ALL, "ring"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: f"{each.kind}-{each.world}")
def test_the_first_line_names_the_rank_that_stops_by_its_number_in_the_job(
    scenario: Scenario,
) -> None:
    line = first_line(scenario)
    assert is_right(scenario, line), line


OF_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, reduce, barrier, recv = dist.get_rank(), dist.all_reduce, dist.barrier, dist.recv
"""
OF_ECHELON = """
import torch, echelon as ec
world = ec.init()
rank, group = world.rank, world.group
reduce, barrier, recv = group.all_reduce, group.barrier, group.recv
"""
CLEANS_UP = """
try:
    if rank == 1:
        raise ValueError("boom")
    reduce(torch.ones(1))
finally:
    {}
"""


@pytest.mark.parametrize("world", ["threads", "processes"])
@pytest.mark.parametrize("start", [OF_TORCH, OF_ECHELON], ids=["torch", "echelon"])
@pytest.mark.parametrize("call", ["barrier()", "recv(torch.ones(1), 0)"])
def test_a_call_in_finally_does_not_hide_the_exception(
    world: str, start: str, call: str, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(start + CLEANS_UP.format(call))
    options = ["--ranks", "3", "--world", world, "--timeout", "3"]
    command = [sys.executable, "-m", "echelon", "run", *options, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("echelon: ")]
    assert lines[0] == "rank 1 at step 0 raised ValueError: boom", done.stderr
