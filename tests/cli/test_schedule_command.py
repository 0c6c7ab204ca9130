"""echelon schedule: the table, a drawing, files, and mistakes."""

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.pipeline import Schedule, choose, schedule, to_text
from echelon.pipeline.schedules.simulate import simulate


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["schedule", *map(str, arguments)], env={"COLUMNS": "100"})
    return result.exit_code, result.output


def test_the_table_has_every_schedule_and_says_which_is_recommended() -> None:
    code, output = call("--ranks", 4, "--microbatches", 8, "--hop", 0.05, "--memory-cap", 4)
    choice = choose(4, 8, costs={"F": 1, "B": 2, "hop": 0.05}, memory_cap=4)
    assert code == 0
    for row in choice.rows:
        line = next(line for line in output.splitlines() if str(row) in line)
        assert f"{row.simulation.makespan:.4g}" in line
        assert ("→" in line) == (row is choice.recommended)
        assert ("over the cap" in line) == (not row.fits)
    assert choice.reason in output.replace("\n", " ").replace("  ", " ")


def test_a_named_schedule_is_drawn_and_written(tmp_path) -> None:
    files = [tmp_path / name for name in ("a.csv", "a.svg", "a.html")]
    code, output = call(
        *("zb", "--ranks", 2, "--microbatches", 4, "--chunks", 2, "--option", "k=2"),
        *("--costs", "F=2,I=2,W=4", "--csv", files[0], "--svg", files[1], "--html", files[2]),
    )
    expected = schedule("zb", 4, 4, 2, k=2)
    assert code == 0
    assert to_text(simulate(expected, {"F": 1, "I": 1, "W": 2}).timeline) in output
    assert Schedule.from_csv(files[0].read_text(), "zb") == expected
    assert files[1].read_text().startswith("<svg")
    assert files[2].read_text().startswith("<!doctype html>")


def test_the_recommended_schedule_is_what_is_written_without_a_name(tmp_path) -> None:
    path = tmp_path / "a.csv"
    code, output = call("--ranks", 2, "--microbatches", 4, "--chunks", "1,2", "--csv", path)
    wanted = choose(2, 4, chunks=[1, 2], costs={"F": 1, "B": 2}).recommended.simulation.schedule
    assert code == 0
    assert Schedule.from_csv(path.read_text(), wanted.name) == wanted
    assert f"{wanted.name} is in {path}" in output.replace("\n", "")


def test_nothing_within_the_cap_ends_with_code_1() -> None:
    code, output = call("--ranks", 4, "--microbatches", 8, "--memory-cap", 0.5)
    assert code == 1
    assert "none is within the memory cap of 0.5" in output


def test_a_drawing_too_wide_for_a_terminal_becomes_the_lists() -> None:
    code, output = call("1f1b", "--ranks", 2, "--microbatches", 900)
    assert code == 0
    assert output.startswith("rank 0 | 0F0 0F1 0B0 0F2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["1f2b", "--ranks", 2, "--microbatches", 4], "there is no schedule '1f2b'"),
        (
            ["1f1b", "--ranks", 2, "--microbatches", 0],
            "microbatches is 0; give a whole number >= 1",
        ),
        (["1f1b", "--ranks", 1, "--chunks", 2, "--microbatches", 4], "world size must be >= 2"),
        (["--ranks", 2, "--microbatches", 4, "--costs", "F"], "NAME=NUMBER"),
        (["--ranks", 2, "--microbatches", 4, "--costs", "F=x"], "--costs has 'x'"),
        (["--ranks", 2, "--microbatches", 4, "--costs", "Z=1"], "costs has 'Z'"),
        (["--ranks", 2, "--microbatches", 4, "--chunks", "two"], "--chunks has 'two'"),
        (["--ranks", 2, "--microbatches", 4, "--option", "k=2"], "give its NAME too"),
        (["zb", "--ranks", 2, "--microbatches", 4, "--option", "k=x"], "--option has 'x'"),
        (["1f1b", "--ranks", 2, "--microbatches", 4, "--csv", "/no/x"], "--csv is /no/x, which"),
        (["gpipe", "--ranks", 2, "--microbatches", 9, "--memory-cap", 2], "keeps 9 microbatches"),
        (["gpipe", "--ranks", 2, "--microbatches", 9, "--memory-cap", "nan"], "--memory-cap"),
    ],
)
def test_a_mistake_ends_with_code_2_and_what_to_do(arguments, message) -> None:
    code, output = call(*arguments)
    assert code == 2
    assert message in output.replace("\n", " ")
