"""echelon schedule check: verdicts, exit codes, and mistakes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from echelon.cli import app
from echelon.pipeline import choose, schedule

GUILTY = "rank 0: [... 0SendF1, 2RecvF0, 2F0]\nrank 1: [... 1SendF0, 1RecvF1, 1F1]\n"


def call(*arguments: object, text: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(
        app, ["schedule", "check", *map(str, arguments)], input=text, env={"COLUMNS": "200"}
    )
    return result.exit_code, result.output


def write(folder: Path, text: str) -> Path:
    path = folder / "lists.txt"
    path.write_text(text)
    return path


def test_the_circle_is_named_and_the_code_is_1(tmp_path) -> None:
    code, output = call(write(tmp_path, GUILTY))
    assert code == 1
    assert "blocking sends                    NOT LEGAL: rank 0 at 0SEND_F1, rank 1" in output
    assert "eager sends                       legal" in output
    assert "rank 0 waits at 0SEND_F1 (line 1, column 14)" in output


def test_a_rule_alone_decides_the_code(tmp_path) -> None:
    path = write(tmp_path, GUILTY)
    assert call(path, "--rule", "eager")[0] == 0
    assert call(path, "--rule", "pair-queue")[0] == 1
    assert call(path, "--batched")[0] == 0


def test_a_dash_reads_the_standard_input() -> None:
    assert call("-", text=GUILTY)[0] == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the text is empty"),
        ("0F0,0X0\n", "line 1, column 5: 0X0 is no action"),
        ("0F0,0B0\n1F0,wörld\n", "line 2, column 5: "),
        ("rank 0: 0F0\nrank 2: 1F0\n", "none for rank 1"),
        ("[[0F0, 0B0]", "does not end with ]"),
        ("__import__('os').system('true')", "is no action"),
    ],
)
def test_bad_input_ends_with_code_2_and_its_place(tmp_path, text, sentence) -> None:
    code, output = call(write(tmp_path, text))
    assert code == 2
    assert sentence in " ".join(output.replace("│", " ").split())


def test_a_file_that_is_not_there_and_an_unknown_rule_end_with_code_2(tmp_path) -> None:
    assert call(tmp_path / "none")[0] == 2
    assert call(write(tmp_path, GUILTY), "--rule", "magic")[0] == 2


def test_no_schedule_is_named_check() -> None:
    assert "check" not in {row.simulation.schedule.name for row in choose(2, 4).rows}
    with pytest.raises(ValueError, match="check"):
        schedule("check", 2, 4, 2)
