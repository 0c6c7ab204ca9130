"""Text of others is shown, not obeyed."""

import pytest

from echelon.errors.message_text import NO_MAJORITY, printable, rows_text


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
