"""A script that trains is run without values, and its memory is that of a run with values."""

import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import mse_loss

import echelon as ec
from echelon.errors import StateError
from echelon.laboratory.allocations import Allocations
from echelon.launch.program import Program
from echelon.planner.script_check import check_script

SCRIPT = """
import sys
import torch
from torch import nn
import echelon as ec

def layers():
    torch.manual_seed(0)
    return [nn.Linear(256, 256) for _ in range(4)]

with ec.init() as world:
    plan = ec.Plan.parse(sys.argv[1], **({"microbatches": 4} if "pp" in sys.argv[1] else {}))
    model = nn.Sequential(*layers())
    loss_fn = nn.functional.mse_loss
    model = ec.parallelize(model, plan, world, loss_fn=loss_fn if plan.pp > 1 else None)
    optimizer = torch.optim.AdamW(model.parameters())
    text = torch.frombuffer(bytearray(range(200)) * 1000, dtype=torch.uint8)
    assert text.max().item() == 199  # what is read has its values
    for step in range(int(sys.argv[2])):
        x = torch.ones(64, 256)
        if plan.pp > 1:
            model.step(x, target=x)
        else:
            loss_fn(model(x), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        ec.save("checkpoints", step=step + 1, model=model)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    return Program(str(script))


def trained(world: ec.World) -> int:
    """The peak of the third step, with values."""
    counts: list[int] = []
    torch.manual_seed(0)
    with Allocations(counts.append, rounding=512):
        layers = [torch.nn.Linear(256, 256) for _ in range(4)]
        model = ec.parallelize(torch.nn.Sequential(*layers), ec.Plan(dp=2), world)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            counts.clear()
            x = torch.ones(64, 256)
            mse_loss(model(x), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return max(counts)


def test_the_peak_of_a_script_is_that_of_its_run(program: Program, tmp_path: Path) -> None:
    [memory] = check_script(program, ["dp=2", "100"], ec.Plan(dp=2))
    # The script's text is 200 kB.
    assert memory.peak - 200_192 == pytest.approx(max(ec.run(trained, 2)), rel=1e-2)
    # Four layers with two moments of Adam, and the buckets of DDP.
    assert memory.kept >= 4 * 4 * 256 * 257 * 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.py"]


@pytest.mark.slow
def test_each_stage_of_a_plan_is_looked_at_and_none_of_its_many_ranks(program: Program) -> None:
    plan = ec.Plan(pp=2, shard=500, microbatches=4)
    first, last = check_script(program, ["pp=2,shard=500", "3"], plan)
    assert (first.stage, first.rank, last.stage, last.rank) == (0, 0, 1, 500)
    [whole] = check_script(program, ["dp=1", "3"], ec.Plan())
    assert max(first.kept, last.kept) < whole.kept / 2


def test_a_script_that_takes_too_few_steps_or_fails_is_refused(program: Program) -> None:
    with pytest.raises(StateError, match="took fewer than 3 steps"):
        check_script(program, ["dp=2", "2"], ec.Plan(dp=2))
    with pytest.raises(StateError, match=r"left with exit code 1, .* and dp=2 must be its plan"):
        check_script(program, ["dp=3", "3"], ec.Plan(dp=2))
