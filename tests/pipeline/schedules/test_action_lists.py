"""Actions as text in every form and as objects, places, and mistakes that are no waits."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.errors import ArgumentError
from echelon.pipeline import schedule
from echelon.pipeline.schedules.action_lists import mistake, read


def test_text_objects_and_schedules_are_the_same_lists() -> None:
    expected = schedule("1f1b", 2, 4, 2)
    rows = [[str(item) for item in order] for order in expected.orders]
    text = "\n".join(",".join(row) for row in rows)
    for source in (expected, rows, dict(enumerate(rows)), text):
        assert read(source).orders == expected.orders


@pytest.mark.parametrize("source", [{1: ["0F0"]}, 3, [], ["0F0"], [["0X0"]]])
def test_what_is_no_list_of_actions_is_refused(source) -> None:
    with pytest.raises(ArgumentError):
        read(source)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0F0,0B0\n1F0,1B0", "0F0"),
        ("0F0,2F0,1F0,2B0,1B0,0B0", "needs the value of 1F0"),
        ("0F0,1F0,0B0,1B0", "needs the value of 1B0"),
        ("0F0,0B0\n1B0,1F0", "1B0"),
    ],
)
def test_a_mistake_names_the_action(text, sentence) -> None:
    assert sentence in str(mistake(read(text)))


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("0F0,,0B0\n1F0,1B0,\n", "CSV"),
        ("[[0F0, 0B0], [1F0, 1B0]]", "lists"),
        ("[0F0, 0B0]\n[1F0, 1B0]", "lists"),
        ("{0: [0F0, None, 0B0], 1: [1F0, 1B0]}", "lines by rank"),
        ("rank 1: 1F0 1B0\nrank 0: 0F0 0B0", "lines by rank"),
        ("[rank0]:0F0, 0B0\n[rank1]:1F0, 1B0", "lines by rank"),
        ("0F0 0B0\n1F0 1B0", "lines"),
    ],
)
def test_each_form_has_the_same_actions_and_their_places(text, form) -> None:
    lists = read(text)
    assert lists.form == form
    rows = [list(map(str, order)) for order in lists.orders]
    assert rows == [["0F0", "0B0"], ["1F0", "1B0"]]
    for row, offsets in zip(rows, lists.offsets, strict=True):
        assert all(text.startswith(*pair) for pair in zip(row, offsets, strict=True))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "empty"),
        ("[" * 50, "inside each other"),
        ("rank 0: 0F0\nrank 1: 1F0\nrank 0: 0B0", "rank 0 has a list already"),
        ("rank 0: 0F0\nrank 2: 1F0", "line 2, column 1: .* none for rank 1"),
        ("0F0\nrank 2: 1F0", "line 1, column 1: no rank is named before it"),
        ("rank 999999: 0F0", "too large"),
        ("0F0]", "line 1, column 4: ] closes no list"),
        ("[0F0]\n...\n[1F0]", "line 2, column 1: ranks are left out"),
        ("0F0 +", r"line 1, column 5: \+ stands between"),
        ("0F0 + 0B0", "line 1, column 1: 0F0 is in a batch"),
        ("[[0F0, [0SEND_F0, ...]]]", "line 1, column 19: a batch has only"),
        ("0F0 wait", "line 1, column 5: wait is no action.* the text ends here"),
    ],
)
def test_a_mistake_in_a_text_has_a_sentence_with_its_place(text, sentence) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        read(text)


@given(st.text(alphabet="0123FBSEND_RECV[](){},;:+.\n rank\u2026é"))
def test_any_text_is_read_or_refused(text) -> None:
    with suppress(ArgumentError):
        assert any(read(text).orders)
