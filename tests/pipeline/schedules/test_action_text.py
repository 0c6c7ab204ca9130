"""The forms in which others write actions, and the places of mistakes."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ArgumentError
from echelon.pipeline.schedules.action_text import read_text


@pytest.mark.parametrize(
    "text",
    [
        "0F0,,0B0\n1F0,1B0,\n",
        "[[0F0, 0B0], [1F0, 1B0]]",
        "{0: [0F0, None, 0B0], 1: [1F0, 1B0]}",
        "rank 1: 1F0 1B0\nrank 0: 0F0 0B0",
        "[rank0]:0F0, 0B0\n[rank1]:1F0, 1B0",
        "0F0 0B0\n1F0 1B0",
        "        Rank 0 Rank 1\nStep 0: 0F0    1F0\nStep 1: 0B0    1B0",
    ],
)
def test_each_form_has_the_same_actions(text) -> None:
    cells = read_text(text).cells
    assert [[cell.text for cell in row] for row in cells] == [["0F0", "0B0"], ["1F0", "1B0"]]
    assert all(text.startswith(cell.text, cell.offset) for row in cells for cell in row)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "empty"),
        ("[" * 50, "inside each other"),
        ("rank 0: 0F0\nrank 1: 1F0\nrank 0: 0B0", "rank 0 has a list already"),
        ("rank 999999: 0F0", "too large"),
        ("0F0]", "line 1, column 4"),
    ],
)
def test_a_mistake_has_a_sentence(text, sentence) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        read_text(text)


@given(st.text(alphabet="0123FBSEND_RECV[](){},;:+.\n rank\u2026é"))
def test_any_text_is_read_or_refused(text) -> None:
    with suppress(ArgumentError):
        assert any(read_text(text).cells)
