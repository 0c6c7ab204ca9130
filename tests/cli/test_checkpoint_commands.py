"""``echelon checkpoint``: what its commands print, and what they refuse."""

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])
    return result.exit_code, f"{result.output}{result.exception or ''}"


@pytest.mark.parametrize("name", ["weights.onnx", "weights.safetensor", "weights.ckpt"])
def test_a_checkpoint_is_not_converted_to_what_no_ending_says(name: str, tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    target = tmp_path / name
    arguments = ["checkpoint", "convert", str(tmp_path / "weights.pt"), str(target)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    for known in (target.suffix, ".safetensors", ".pt", ".pth", ".bin", "--to echelon"):
        assert known in result.output
    assert not target.exists()
    assert CliRunner().invoke(app, [*arguments, "--to", "echelon"]).exit_code == 0
    assert target.is_dir()


def test_a_run_is_converted_to_a_folder_whose_name_has_a_number_after_a_dot(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    arguments = ["checkpoint", "convert", str(tmp_path / "weights.pt"), str(tmp_path / "llama-3.1")]
    assert CliRunner().invoke(app, arguments).exit_code == 0


@pytest.mark.parametrize("command", ["ls", "verify", "diff"])
def test_a_folder_without_steps_gets_a_sentence_with_where_some_are(
    command: str, tmp_path: Path
) -> None:
    folders = [tmp_path] * (2 if command == "diff" else 1)
    code, text = invoke(command, *folders)
    assert code == 2
    assert text.splitlines()[0] == f"echelon checkpoint: {tmp_path}: no step was committed here"
    ec.save(tmp_path / "run", step=1, value=1)
    _, text = invoke(command, *folders)
    assert "no step was committed here; there are steps in 'run' below it" in text


def test_a_step_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    for step in (3, 20):
        ec.save(tmp_path / "run", step=step, value=1)
    _, text = invoke("convert", tmp_path / "run", tmp_path / "x.pt", "--step", 4)
    assert "step 4 is not there; committed: 3, 20" in text


def test_a_difference_beside_tensors_is_named_with_its_values(tmp_path: Path) -> None:
    for name, rates in (("a", [1, 2.5]), ("b", [1, 2.0])):
        ec.save(tmp_path / name, model=nn.Linear(2, 2), step=1, notes={"rates": rates, "n": 1})
    code, text = invoke("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1
    assert "rates[1]: 2.5 and 2.0" in text


def test_a_folder_above_runs_says_where_steps_are(tmp_path: Path) -> None:
    ec.save(tmp_path / "runs" / "first", model=nn.Linear(2, 2), step=1)
    code, text = invoke("ls", tmp_path / "runs")
    assert code != 0
    assert "there are steps in 'first' below it" in text


@pytest.mark.parametrize("command", ["ls", "verify", "diff"])
def test_a_file_in_place_of_a_folder_gets_the_command_that_makes_a_folder_of_it(
    command: str, tmp_path: Path
) -> None:
    torch.save({"weight": torch.ones(2)}, tmp_path / "weights.pt")
    files = [tmp_path / "weights.pt"] * (2 if command == "diff" else 1)
    code, output = invoke(command, *files)
    assert code == 2
    assert "is a file" in output
    assert "does not exist" not in output
    assert invoke("convert", tmp_path / "weights.pt", tmp_path / "run")[0] == 0
    assert invoke("ls", tmp_path / "run")[0] == 0
