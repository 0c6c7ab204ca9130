"""echelon compare: a loop, plans, a page, and mistakes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app

SCRIPT = """
import torch
from torch import nn
from torch.nn.functional import mse_loss as loss_fn

torch.manual_seed(0)
batches = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(3)]

def make_model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

assert __name__ != "__main__"
"""
TRAIN = """
def train(world, model, batches, optimizer):
    stepper = optimizer(model.parameters())
    for x, y in batches:
        loss_fn(model(x[world.rank :: world.size]), y[world.rank :: world.size]).backward()
        for param in model.parameters():
            world.group.all_reduce(param.grad, OPERATION)
        stepper.step()
        stepper.zero_grad()
"""


def call(folder: Path, text: str, *arguments: object) -> tuple[int, str]:
    script = folder / "compared.py"
    script.write_text(text)
    words = ["compare", str(script), *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_loop_that_sums_gradients_leaves_with_1_and_its_cause(tmp_path: Path) -> None:
    text = SCRIPT + TRAIN.replace("OPERATION", "'sum'")
    code, output = call(tmp_path, text, "--ranks", 4, "--steps", 1)
    assert code == 1
    assert output.startswith("NOT the same: train on 4 ranks and one process, 1 step")
    assert "gradients were summed and not averaged" in output


def test_a_loop_that_is_right_leaves_with_0(tmp_path: Path) -> None:
    code, output = call(tmp_path, SCRIPT + TRAIN.replace("OPERATION", "'mean'"))
    assert (code, output.splitlines()[0]) == (
        0,
        "the same: train on 2 ranks and one process, 3 steps in float64",
    )


def test_several_plans_are_compared_and_drawn_on_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    plans = ("--plan", "shard=2", "--plan", "pp=2,dp=2", "--microbatches", 2)
    code, output = call(tmp_path, SCRIPT, *plans, "--clip", 0.1, "--html", page)
    assert code == 0
    assert "the same: plan shard=2 on 2 ranks" in output
    assert "the same: plan pp=2,dp=2 on 4 ranks" in output
    assert "note" not in output  # shards are shards, also of a small model
    assert page.read_text().count("<b>the same") == 2


def test_the_plan_of_a_script_is_compared(tmp_path: Path) -> None:
    code, output = call(tmp_path, SCRIPT + "\nimport echelon as ec\nplan = ec.Plan(dp=4)\n")
    assert code == 0
    assert "plan dp=4" in output


@pytest.mark.parametrize(
    ("text", "arguments", "sentence"),
    [
        (SCRIPT, (), "defines neither train"),
        (SCRIPT.replace("def optimizer", "def other"), (), "does not define optimizer"),
        (SCRIPT, ("--plan", "tp=2"), "tp"),
        (SCRIPT, ("--plan", "dp=3"), "cannot share evenly"),
        (SCRIPT, ("--plan", "dp=2", "--steps", 9), "3 of them for 9 steps"),
    ],
)
def test_a_script_that_cannot_be_compared_gets_a_sentence(
    tmp_path: Path, text: str, arguments: tuple[object, ...], sentence: str
) -> None:
    code, output = call(tmp_path, text, *arguments)
    assert code == 2
    assert sentence in output.replace("│", "").replace("\n", " ")


BROKEN_TRAIN = """
def train(world, model, batches, optimizer):
    if world.rank == 1:
        raise KeyError("in train")
    world.group.barrier()
"""


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("x = = 3", ["    x = = 3", "        ^", "SyntaxError: invalid syntax"]),
        ("raise ValueError('boom')", ["    raise ValueError('boom')", "ValueError: boom"]),
        (SCRIPT + BROKEN_TRAIN, ["KeyError: 'in train'", "raised on rank 1 of 2"]),
    ],
)
def test_what_a_script_raises_is_shown_with_the_frames_of_its_user_only(
    tmp_path: Path, text: str, last: list[str]
) -> None:
    code, output = call(tmp_path, text)
    lines = output.splitlines()
    assert (code, lines[-len(last) :]) == (1, last)
    files = [line.split('"')[1] for line in lines if line.startswith("  File ")]
    assert files == [str(tmp_path / "compared.py")]


@pytest.mark.parametrize("page", ["a file/page.html", "nowhere/page.html", "."])
def test_a_page_that_cannot_be_written_gets_a_sentence(tmp_path: Path, page: str) -> None:
    (tmp_path / "a file").touch()
    text = SCRIPT + TRAIN.replace("OPERATION", "'mean'")
    code, output = call(tmp_path, text, "--steps", 1, "--html", tmp_path / page)
    assert code == 2
    assert "which cannot be written" in output.replace("│", "").replace("\n", " ")


def test_the_example_is_the_same() -> None:
    script = Path(__file__).parents[2] / "examples" / "compare_mlp.py"
    result = CliRunner().invoke(app, ["compare", str(script), "--ranks", "4"])
    assert result.exit_code == 0, result.output


def test_a_missing_script_gets_a_sentence() -> None:
    result = CliRunner().invoke(app, ["compare", "nowhere.py"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "does not exist" in result.output
