"""Text of others is shown, not obeyed."""

import pytest

from echelon.errors.message_text import printable


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
