"""No command prints what a terminal would obey, whoever has written it."""

import ast
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import echelon.cli
from echelon.cli import app
from echelon.cli.output import cell, printable_errors, refusing, say

HOSTILE = "\x1b]0;OWNED\x07\x1b[2Jname\r"
SHOWN = r"\x1b]0;OWNED\x07\x1b[2Jname\r"


def test_texts_cells_and_errors_are_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    say(HOSTILE)
    assert capsys.readouterr().out == f"{SHOWN}\n"
    assert cell(HOSTILE).plain == SHOWN
    with pytest.raises(typer.BadParameter) as caught, printable_errors():
        raise typer.BadParameter(HOSTILE)
    assert caught.value.message == SHOWN


def test_the_errors_that_a_command_names_are_wrong_usage_and_others_are_not() -> None:
    @refusing(ValueError, TypeError, hint="--step")
    def command(error: Exception) -> None:
        raise error

    for error in (ValueError("no"), TypeError("no")):
        with pytest.raises(typer.BadParameter) as caught:
            command(error)
        assert (caught.value.message, caught.value.param_hint) == ("no", "--step")
    with pytest.raises(KeyError):
        command(KeyError("a defect"))


@pytest.mark.parametrize(
    "words",
    [
        ("report", HOSTILE),
        ("replay", HOSTILE, "--list"),
        ("checkpoint", "ls", HOSTILE),
        ("schedule", "check", HOSTILE),
        ("plan", HOSTILE, "--cluster", "8 H100", "--global-batch", "8"),
        ("run", "--ranks", "1", HOSTILE),
    ],
    ids=lambda words: words[0],
)
def test_a_command_shows_a_hostile_name_and_obeys_nothing(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "OWNED" in result.output
    assert "\x1b" not in result.output
    assert "\x07" not in result.output


def test_no_command_prints_by_another_way() -> None:
    for path in sorted(Path(echelon.cli.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and path.name != "output.py":
                assert ast.unparse(node.func) not in ("print", "typer.echo", "typer.secho"), path
