"""Views of schedules: drawn where they can run, explained where they cannot, small where large."""

import pytest

from echelon.page import Picture, TextTable, view_of
from echelon.pipeline import Schedule, Timeline, choose, schedule, simulate

LARGE = schedule("1f1b", 64, 128, 64)


def test_a_schedule_is_drawn_with_unit_costs() -> None:
    view = view_of(schedule("1f1b", 2, 2, 2))
    assert view.title == "1f1b: 2 ranks, 2 stages, 2 microbatches"
    assert view.facts[:2] == [("9", "time"), ("33.33%", "bubble")]
    timeline, table = (part.content for part in view.parts)
    assert isinstance(timeline, Picture)
    assert timeline.text.startswith("rank 0 | 0F0 0F1  .   .  0B0 ===")
    assert timeline.svg.count("<rect") == 8
    assert isinstance(table, TextTable)
    assert [row[0] for row in table.rows] == ["0", "1"]


def test_a_schedule_that_cannot_run_shows_why_and_its_lists() -> None:
    stuck = Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0", name="<b>")
    html = stuck._repr_html_()
    assert "It cannot run" in html
    assert "0B0 waits for 1B0 of rank 1" in html
    assert "rank 1 | 1F1 1B1 1F0 1B0" in html
    assert "<b>: 2 ranks" not in html


def test_a_choice_is_its_table_and_its_reason() -> None:
    choice = choose(2, 4)
    table, reason = (part.content for part in view_of(choice).parts)
    assert isinstance(table, TextTable)
    assert len(table.rows) == len(choice.rows)
    assert reason == choice.reason
    assert repr(choice) == f"<Choice of {choice.recommended} among {len(choice.rows)} schedules>"


@pytest.mark.parametrize("shown", [LARGE, simulate(LARGE), simulate(LARGE).timeline], ids=type)
def test_64_ranks_fit_in_a_few_lines_and_in_a_cell(shown: Schedule | Timeline) -> None:
    assert len(repr(shown)) < 250
    html = shown._repr_html_()
    assert len(html) < 60_000
    assert "are too many for a picture here" in html
