"""``echelon plan --check``, as it is typed."""

import os
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.cli.script_check_command import show
from echelon.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--layers", "2", "--width", "64", "--heads", "2", "--data", str(ROOT / "docs")]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return str(ROOT / "examples" / "train_gpt.py")


@pytest.mark.slow
def test_a_script_that_fits_leaves_with_0_and_writes_nothing(script: str, tmp_path: Path) -> None:
    command = ["plan", "--check", script, "--cluster", "4 H100", "--", *SMALL]
    result = CliRunner().invoke(app, [*command, "--plan", "pp=2,shard=2"])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()[-2:]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("0", "0", "fits"), ("1", "2", "fits")]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_script_that_does_not_fit_leaves_with_1(script: str) -> None:
    wide = ["--layers", "24", "--width", "8192", "--heads", "64", "--context", "4096"]
    command = ["plan", "--check", script, "--cluster", "2 H100", "--", *wide, "--data", SMALL[-1]]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1
    assert "does not fit" in result.output


def test_what_cannot_be_checked_gets_a_sentence(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ArgumentError, match="for 4 ranks, and the cluster has 8 devices"):
        show(script, ["--plan", "dp=4"], "8 H100", [])
    with pytest.raises(ArgumentError, match="does not exist"):
        show(str(tmp_path / "no.py"), [], "8 H100", [])
    with pytest.raises(ArgumentError, match=r"--max-memory is 1e.300"):
        show(script, [], "8 H100", [], 1e300)
    (tmp_path / "short.py").write_text("print('no step')\n")
    assert show(str(tmp_path / "short.py"), [], "8 H100", ["pp=1"]) == 2
    assert "took fewer than 3 steps" in capsys.readouterr().err
    result = CliRunner().invoke(app, ["plan", "--cluster", "8 H100"])
    assert result.exit_code == 2
    assert "give one MODEL and --global-batch" in result.output


SCRIPT = """
import os, torch, echelon as ec
world = ec.init()
assert os.environ["WORLD_SIZE"] == str(world.size) == "8", os.environ["WORLD_SIZE"]
assert os.environ["RANK"] == str(world.rank)
model = ec.DDP(torch.nn.Linear(300, 300), world.group)
optimizer = torch.optim.AdamW(model.parameters())
while True:
    model(torch.randn(8, 300)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_variables_of_torchrun_are_those_of_the_planned_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = dict(os.environ)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert show(str(tmp_path / "train.py"), [], "8 H100", []) == 0
    assert show(str(tmp_path / "train.py"), [], "8 H100", [], max_memory_gib=1e-4) == 1
    assert dict(os.environ) == before


def test_a_plan_that_is_given_twice_is_refused(script: str) -> None:
    with pytest.raises(ArgumentError, match="--fix is 'dp=8', and the script has --plan"):
        show(script, ["--plan", "shard=8"], "8 H100", ["dp=8"])
