"""The options of echelon replay are shown without torch."""

import sys

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from tests.processes import run_python


def test_help_names_every_option() -> None:
    result = CliRunner().invoke(app, ["replay", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in ("--step", "--rank", "--pdb", "--batch-of", "--anyway", "--list", "--keep"):
        assert option in result.output


@pytest.mark.slow
def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from echelon.cli import app; "
        "CliRunner().invoke(app, ['replay', '--help']); sys.exit('torch' in sys.modules)"
    )
    assert run_python("-c", code).returncode == 0, sys.version
