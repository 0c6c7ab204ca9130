"""Trainings that end well, many times: nothing is said, and nothing is left."""

import os
import re
import sys
from pathlib import Path

import pytest

import echelon as ec
from tests.cli.jobs import ECHELON_RUN, Job
from tests.long.failing_jobs import IMPORTS, run_out

NUM_EXITS = int(os.environ.get("ECHELON_EXITS", "50"))  # of each technique
NUM_STEPS = 3
TECHNIQUES = {"ddp": "ddp2", "fsdp": "fsdp2", "pipeline": "pp2"}
LAUNCHERS = {
    "torchrun": (
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", "2"),
    ),
    "echelon run": ECHELON_RUN,
}
BACKENDS = ("shm", "gloo")

SCRIPT = f"""
{IMPORTS}
folder, layout, backend, end = sys.argv[1:]
world = ec.init(backend)
trainee = LAYOUTS[layout].trainee(world)
for step in range({NUM_STEPS}):
    trainee.train(step)
ec.save(folder, step={NUM_STEPS}, model=trainee.model, optimizer=trainee.optimizer)
if end == "closes":
    world.close()
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("repetition", range(NUM_EXITS))
def test_a_training_ends_without_a_word(technique: str, repetition: int, tmp_path: Path) -> None:
    launcher = list(LAUNCHERS)[repetition % 2]
    backend, end = BACKENDS[repetition // 2 % 2], ("closes", "ends")[repetition // 4 % 2]
    logs = tmp_path / "logs"
    options = ("--log-dir", str(logs)) if launcher == "echelon run" else ()
    arguments = (str(tmp_path / "run"), TECHNIQUES[technique], backend, end)
    with Job(tmp_path, SCRIPT, *arguments, launcher=LAUNCHERS[launcher], options=options) as job:
        code, lines, _ = run_out(job)
    assert code == 0, lines
    assert lines == []
    for log in logs.rglob("stderr.log"):  # of the ranks
        assert log.read_text() == ""
    for log in logs.glob("*.log"):  # of the agent
        assert not re.search(r"terminate called|Traceback|[Ww]arning", log.read_text())
    assert ec.steps(tmp_path / "run") == [NUM_STEPS]
