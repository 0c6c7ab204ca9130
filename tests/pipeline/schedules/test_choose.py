"""The table of schedules, and which one it recommends."""

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline import choose, schedule, simulate
from echelon.pipeline.schedules.choose import ALIKE
from echelon.pipeline.schedules.families import FAMILIES


def test_every_schedule_that_trains_is_in_the_table() -> None:
    choice = choose(2, 8)
    assert {row.name for row in choice.rows} == set(FAMILIES) - {"forward-only"}
    assert len({str(row) for row in choice.rows}) == len(choice.rows)


def test_rows_are_simulations_of_a_share_cut_into_chunks_from_fast_to_slow() -> None:
    choice = choose(4, 8, costs={"F": 1, "I": 1, "W": 1, "hop": 0.1})
    times = [row.simulation.makespan for row in choice.rows]
    assert times == sorted(times)
    row = next(row for row in choice.rows if str(row) == "zb(v=4, k=2)")
    costs = {"F": 0.25, "I": 0.25, "W": 0.25, "hop": 0.1}
    assert row.simulation.makespan == simulate(schedule("zb", 16, 8, 4, k=2), costs).makespan


def test_pairs_are_fused_only_where_their_cost_is_given() -> None:
    fused = "dualpipe-v(fused=True)"
    assert fused not in {str(row) for row in choose(2, 4, chunks=[2]).rows}
    choice = choose(2, 4, chunks=[2], costs={"F": 1, "B": 2, "F&B": 1})
    row = next(row for row in choice.rows if str(row) == fused)
    costs = {"F": 0.5, "B": 1, "F&B": 0.5}
    wanted = simulate(schedule("dualpipe-v", 4, 4, 2, fused=True), costs)
    assert row.simulation.makespan == wanted.makespan


# Known bubbles over all ranks in percent, eight ranks and 32 microbatches.
@pytest.mark.slow
def test_bubbles_with_messages_and_uneven_halves_are_the_known_ones() -> None:
    names = ("1f1b", "interleaved(v=4, factor=2)", "zb-h1", "zb-h2", "zb(v=2, k=1)")
    names += ("zb(v=4, k=1)", "zb(v=4, k=2)", "zb-v")
    choice = choose(8, 32, costs={"F": 1, "I": 1.2, "W": 0.8, "hop": 0.05})
    found = {str(row): 100 * row.simulation.span_bubble for row in choice.rows}
    known = (20.3, 8.0, 10.4, 7.1, 6.5, 5.0, 3.7, 5.7)
    assert tuple(round(found[name], 1) for name in names) == known


def test_the_recommended_is_among_the_fastest_within_the_cap_and_needs_least_memory() -> None:
    for cap in (None, 4, 2):
        choice = choose(4, 8, chunks=[1, 2], costs={"F": 1, "B": 2, "hop": 0.05}, memory_cap=cap)
        assert [row.fits for row in choice.rows] == [
            cap is None or row.peak <= cap for row in choice.rows
        ]
        fitting = [row for row in choice.rows if row.fits]
        limit = fitting[0].simulation.makespan * (1 + ALIKE)
        alike = [row for row in fitting if row.simulation.makespan <= limit]
        assert choice.recommended in alike
        assert choice.recommended.peak == min(row.peak for row in alike)
        assert str(choice.recommended) in choice.reason
        assert (f"cap of {cap}" in choice.reason) == (cap is not None)


def test_a_cap_that_none_is_within_recommends_none_and_says_what_comes_nearest() -> None:
    choice = choose(4, 8, memory_cap=0.5)
    assert choice.recommended is None
    assert "the least is v-min, which keeps 2" in choice.reason


def test_the_table_as_text_marks_the_recommended_row() -> None:
    choice = choose(4, 8, memory_cap=4)
    lines = str(choice).splitlines()
    assert len(lines) == len(choice.rows) + 2
    marked = [line for line in lines if line.startswith("* ")]
    assert len(marked) == 1
    assert str(choice.recommended) in marked[0]
    assert [line for line in lines if line.startswith("x gpipe")] != []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"costs": {"F": [1, 2]}}, "give one number for a rank's share"),
        ({"chunks": [0]}, "give numbers of stages per rank"),
        ({"chunks": []}, "give numbers of stages per rank"),
    ],
)
def test_what_cannot_be_compared_is_refused(options, sentence) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        choose(2, 4, **options)
