"""Each rank has a row, and colours say what is done or held, never by whom."""

import re

from echelon.observe.rank_figures import (
    memory_rows,
    phase_rows,
    timeline_rows,
    traffic_rows,
    unit_rows,
    waits_table,
)
from tests.observe.runs import summary


def ranks(num: int) -> list[dict]:
    return [summary(rank) for rank in range(num)]


def test_few_ranks_have_a_row_each_and_many_the_lowest_the_median_and_the_highest() -> None:
    for num, expected in (
        (2, {"rank 0": 1, "rank 1": 2}),
        (64, {"lowest rank": 1, "median rank": 33, "highest rank": 64}),
    ):
        rows = memory_rows(ranks(num)).rows
        assert {row.name: row.bars[0].end / 2**20 for row in rows} == expected
        assert [row.group for row in rows if row.group] == ["parameters"]  # not what is empty


def test_the_rows_of_two_ranks_have_the_same_colours() -> None:
    for figure in (memory_rows(ranks(2)), phase_rows(ranks(2))):
        first, second = ([bar.meaning for bar in row.bars] for row in figure.rows)
        assert first == second


def test_phases_are_shares_of_the_time_of_a_rank() -> None:
    (row,) = phase_rows(ranks(1)).rows
    shares = {bar.meaning: bar.end - bar.start for bar in row.bars if bar.end > bar.start}
    assert shares == {"forward": 75.0, "communication": 25.0}
    assert row.total == "4.0 s"
    assert phase_rows([{**summary(0), "phases": {}}]) is None


def test_volumes_stand_by_group_and_collective_without_tiny_ones() -> None:
    rows = traffic_rows(ranks(3)).rows
    assert [(row.group, row.name, row.total) for row in rows] == [
        ("group world, ranks 0 to 2", "all_reduce", "2.0 MiB")
    ]


def test_actions_of_a_pipeline_have_a_colour_by_their_kind_and_the_ranks_of_the_job() -> None:
    steps = [[1, "0F0", 0.0, 0.25], [3, "1W0", 0.25, 1.0]]
    figure = timeline_rows({"timelines": {"planned": steps}})
    assert figure.legend == {"forward": "forward", "weights": "gradients of weights"}
    first, second = figure.rows
    assert (first.name, first.group, first.total) == ("rank 1", "planned", "25% busy")
    assert (second.name, second.bars[0].start, second.bars[0].end) == ("rank 3", 250.0, 1000.0)


def test_a_unit_has_a_bar_for_each_time_that_it_was_gathered() -> None:
    line = {"time_s": [0.0, 0.5], "units": [["a", 0.1, 0.2, 8], ["a", 0.3, 0.4, 8]]}
    figure = unit_rows(line)
    (row,) = figure.rows
    assert (row.name, row.total, figure.end) == ("a", "2×", 500.0)
    assert [(bar.start, bar.end) for bar in row.bars] == [(100.0, 200.0), (300.0, 400.0)]


def test_waits_have_a_row_for_who_waited_and_a_column_for_whom() -> None:
    table = waits_table([[0.0, 0.5], [2.0, 0.0]])
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    cells = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
    assert cells == [
        ["", "for rank 0", "for rank 1"],
        ["rank 0 waited", "–", "500 ms"],
        ["rank 1 waited", "2,000 ms", "–"],
        ["all ranks", "2,000 ms", "500 ms"],
    ]


def test_of_many_ranks_the_table_has_those_that_others_waited_for_most() -> None:
    size = 40
    waited = [[float(last == 17) for last in range(size)] for _ in range(size)]
    table = waits_table(waited)
    assert "for rank 17" in table
    assert table.count("<th>for rank") == 8
