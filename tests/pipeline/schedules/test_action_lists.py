"""Actions as text and as objects, and mistakes that are no waits."""

import pytest

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
