"""The options of echelon plan are those of ec.plan, and its help waits for nothing."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import echelon as ec
from echelon.cli import app
from echelon.cli.plan_arguments import plan_with
from tests.children import environ

ROOT = Path(__file__).resolve().parents[2]
# The names of ec.plan's arguments on the command line, where they are others.
RENAMED = {"fixed": "fix", "keep": "best"}


def test_every_argument_of_ec_plan_is_an_option() -> None:
    command = inspect.signature(plan_with).parameters
    for name, argument in inspect.signature(ec.plan).parameters.items():
        if name == "example":
            continue  # of a module, which is no file
        option = command[RENAMED.get(name, name)]
        # The command looks at all axes, its list is empty, and --check and --measure need less.
        if name not in ("axes", "fixed", "model", "cluster", "global_batch"):
            assert option.default in (argument.default, ...), name


@pytest.mark.slow
def test_the_help_needs_neither_torch_nor_the_planner() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from echelon.cli import app; "
        "shown = CliRunner().invoke(app, ['plan', '--help']); "
        "assert shown.exit_code == 0 and '--global-batch' in shown.output; "
        "assert not {'torch', 'echelon.planner'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environ(), timeout=60)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--fix", "pp=2", "--fix", "pp=4"], "--fix gives pp as 2 and as 4"),
        (["--save-rate", "2"], "--save-rate does nothing with no --mtbf"),
        (["--scale", "8,16", "--html", "x.html"], "--html does nothing with --scale or --mtbf"),
        (["--scale", "8,16", "--goal", "memory"], "--goal does nothing with --scale or --mtbf"),
        (["--mtbf", "9", "--price", "2"], "--price does nothing with --scale or --mtbf"),
        (["--json", "--explain", "3"], "--explain does nothing with --json"),
        (["--check", "x.py"], "--global-batch does nothing with --check"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(options: list[str], sentence: str) -> None:
    model = str(ROOT / "examples" / "models" / "llama-3-8b.json")
    command = ["plan", model, "--cluster", "8 H100", "--global-batch", "64", *options]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, command)
    assert result.exit_code == 2
    assert sentence in " ".join(result.output.split())


def test_no_cluster_is_measured_for_a_script() -> None:
    result = CliRunner().invoke(app, ["plan", "--measure", "2", "--check", "x.py"])
    assert result.exit_code == 2
    assert "--measure does nothing with --check" in " ".join(result.output.split())
