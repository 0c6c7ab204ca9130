"""Text of others is shown, not obeyed."""

import ast
import io
import sys
from pathlib import Path

import pytest

import echelon
from echelon.errors.message_text import NO_MAJORITY, printable, rows_text, say, without_middle


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain [bold] text: é, 日本, a\tb\n", "plain [bold] text: é, 日本, a\tb\n"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("over\rwritten\b", r"over\rwritten\x08"),
        ("\x9b31m", r"\x9b31m"),  # the same as ESC [ to some terminals
        ("\u202egnp.exe", r"\u202egnp.exe"),  # reversed
        ("\ud800", r"\ud800"),
        ("a\u2028b", r"a\u2028b"),
    ],
)
def test_what_a_terminal_would_obey_is_shown_as_its_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("values", [["a", "b"], ["a", "a", "b", "b"], ["a", "b", "c"]])
def test_of_ranks_without_a_majority_none_is_marked(values: list[str]) -> None:
    rows = [f"  rank {rank}: {value}" for rank, value in enumerate(values)]
    assert rows_text(dict(enumerate(values))).splitlines() == [*rows, NO_MAJORITY]


def test_ranks_unlike_the_majority_are_marked() -> None:
    assert rows_text({0: "b", 1: "a", 2: "a", 3: "c", 4: "a"}).splitlines() == [
        "  rank 0: b   <-- differs",
        "  rank 1: a",
        "  rank 2: a",
        "  rank 3: c   <-- differs",
        "  rank 4: a",
    ]


def test_lines_for_a_person_go_to_standard_error_and_a_terminal_obeys_nothing_in_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    say("first", ValueError("\x1b[31mred"))
    assert capsys.readouterr() == ("", "first\n\\x1b[31mred\n")


def test_nobody_prints_to_standard_error_by_another_way() -> None:
    streams = {"sys.stderr", "standard_error()"}
    places = {
        path.name
        for path in Path(str(echelon.__file__)).parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        if any(ast.unparse(keyword.value) in streams for keyword in node.keywords)
    }
    # The text of a SystemExit is printed as Python prints it.
    assert places == {"message_text.py", "forks.py"}


@pytest.mark.parametrize("length", [6, 7, 40, 400])
def test_a_text_without_its_middle_has_at_most_the_length_and_keeps_its_ends(length: int) -> None:
    for num in range(2 * length):
        text = "".join(chr(ord("a") + i % 26) for i in range(num))
        shown = without_middle(text, length)
        assert len(shown) <= length
        if num <= length:
            assert shown == text
        else:
            start, _, end = shown.partition(" … ")
            assert text.startswith(start)
            assert text.endswith(end)


@pytest.mark.parametrize("is_closed", [True, False])
def test_what_is_said_comes_to_the_file_of_standard_error_though_a_program_has_closed_it(
    is_closed: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed if is_closed else None)
    say("rank 1 raised ValueError: boom")
    assert capfd.readouterr() == ("", "rank 1 raised ValueError: boom\n")
