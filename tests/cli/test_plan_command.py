"""echelon plan: the table, one plan explained, JSON, exit codes and mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
LLAMA = MODELS / "llama-3-8b.json"


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["plan", *map(str, arguments)], env={"COLUMNS": "200", "TERM": "dumb"}
    )
    return result.exit_code, result.output


def test_the_best_plans_are_a_table_with_what_bounds_them() -> None:
    code, output = call(LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--best", 3)
    assert code == 0
    assert "8.03 B parameters on 8 H100-SXM" in output
    assert "attention 3" in output
    assert len(output.splitlines()) == 5


def test_the_terms_of_a_plan_add_up() -> None:
    code, output = call(
        LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--explain", 1, "--fix", "pp=2"
    )
    assert code == 0
    assert "pp=2" in output.splitlines()[0]
    parts = [float(line.split()[-1].rstrip("%")) for line in output.splitlines() if "%" in line]
    assert sum(parts) == pytest.approx(100, abs=1)


def test_json_has_the_axes_the_terms_and_the_bytes() -> None:
    code, output = call(LLAMA, "--cluster", "8 H100", "--global-batch", 16, "--json", "--best", 2)
    plans = json.loads(output)["plans"]
    assert code == 0
    assert len(plans) == 2
    for plan in plans:
        assert sum(plan["seconds"].values()) == pytest.approx(plan["step_s"])
        assert sum(plan["bytes"].values()) == pytest.approx(plan["peak_gib"] * 2**30)


def test_where_nothing_fits_the_nearest_plan_is_named_with_its_bytes() -> None:
    code, output = call(MODELS / "llama-3-405b.json", "--cluster", "8 H100", "--global-batch", 8)
    assert code == 1
    assert "None of" in output
    assert "GiB at the peak of its step" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--cluster", "8 H900"), "device is 'H900'"),
        (("--cluster", "8 H100", "--fix", "pp=x"), "--fix is 'pp=x'"),
        (("--cluster", "8 H100", "--fix", "zz=2"), "fixed has 'zz'"),
        (("--cluster", "8 H100", "--stack", "horovod"), "stack is 'horovod'"),
        (("--cluster", "8 H100", "--explain", "0"), "--explain is 0"),
        (("--cluster", "3 H100", "--fix", "pp=7"), "no plan divides 3 devices"),
    ],
)
def test_mistakes_are_said(arguments: tuple[str, ...], sentence: str) -> None:
    code, output = call(LLAMA, "--global-batch", 16, *arguments)
    assert code == 2
    assert sentence in " ".join(output.replace("│", " ").split())
