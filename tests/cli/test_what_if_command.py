"""echelon plan --scale and --mtbf: a table over sizes, JSON, exit codes and mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app

LLAMA = Path(__file__).resolve().parents[2] / "examples" / "models" / "llama-3-8b.json"


def call(*arguments: object) -> tuple[int, str]:
    fixed = ("--cluster", "1x8 H100", "--global-batch", "64", "--fix", "tp=1", "--fix", "cp=1")
    result = CliRunner().invoke(
        app, ["plan", str(LLAMA), *fixed, *map(str, arguments)], env={"COLUMNS": "200"}
    )
    return result.exit_code, result.output


@pytest.mark.slow
def test_each_size_has_its_best_plan_its_time_and_its_device_hours() -> None:
    code, output = call("--scale", "8,16,32", "--json")
    rows = json.loads(output)
    assert code == 0
    assert [row["devices"] for row in rows] == [8, 16, 32]
    speeds = [row["tokens_per_second"] for row in rows]
    assert speeds == sorted(speeds)
    for row in rows:
        assert row["tokens_per_second"] == pytest.approx(64 * 8192 / row["step_s"])
        hours = row["devices"] * 1e9 / row["tokens_per_second"] / 3600
        assert row["device_hours_for_1e9_tokens"] == pytest.approx(hours)


def test_failures_have_an_interval_and_a_part_that_is_lost() -> None:
    code, output = call("--mtbf", 1000, "--save-rate", 2, "--json")
    (row,) = json.loads(output)
    assert code == 0
    assert row["save_s"] == pytest.approx(12 * 8_030_261_248 / 2e9)
    assert 0 < row["lost"] < 0.05
    code, output = call("--mtbf", 1000, "--save-rate", 2, "--scale", "8,16")
    assert code == 0
    assert "checkpoint every min" in output
    assert len(output.splitlines()) == 3


def test_a_size_without_a_plan_says_why_and_leaves_with_1() -> None:
    code, output = call("--scale", "128")
    assert code == 1
    assert "no plan divides 128 devices" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--scale", "8,x"), "--scale is '8,x'"),
        (("--scale", "12"), "size is 12: give a multiple of the 8 devices"),
        (("--mtbf", "10"), "--mtbf needs --save-rate"),
        (("--mtbf", "0", "--save-rate", "1"), "--mtbf is 0.0"),
        (("--mtbf", "1e308", "--save-rate", "1"), "--mtbf is 1e+308"),
        (("--mtbf", "9", "--save-rate", "0"), "--save-rate is 0.0"),
        (("--mtbf", "9", "--save-rate", "1", "--restart", "0"), "--restart is 0.0"),
        (("--scale", "9" * 5000), "--scale is '999"),
    ],
)
def test_mistakes_are_said(arguments: tuple[str, ...], sentence: str) -> None:
    code, output = call(*arguments)
    assert code == 2
    assert sentence in " ".join(output.replace("│", " ").split())
