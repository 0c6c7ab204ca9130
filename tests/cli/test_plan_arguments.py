"""The options of echelon plan are those of ec.plan, and its help waits for nothing."""

import inspect
import subprocess
import sys

import echelon as ec
from echelon.cli.plan_arguments import plan_with
from tests.children import environ

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


def test_the_help_needs_neither_torch_nor_the_planner() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from echelon.cli import app; "
        "shown = CliRunner().invoke(app, ['plan', '--help']); "
        "assert shown.exit_code == 0 and '--global-batch' in shown.output; "
        "assert not {'torch', 'echelon.planner'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=environ(), timeout=60)
