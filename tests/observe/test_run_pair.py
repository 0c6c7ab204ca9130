import re

from echelon.observe.recorded_run import RecordedRun
from echelon.observe.run_pair import (
    loss_chart_of_two,
    pair_names,
    pair_sections,
    phase_rows_of_two,
    speed_chart_of_two,
)
from tests.observe.runs import run_lines


def pair() -> tuple[RecordedRun, RecordedRun]:
    """Two runs, the second of which is twice as fast, has four ranks and another option."""
    first, second = run_lines(ranks=2), run_lines(ranks=4)
    second[0] |= {"name": "b", "config": {"lr": "<0.1>", "plan": "<pp>"}}
    for line in second:
        if line["kind"] == "step":
            line["tokens_per_s"] *= 2
            line["phases"] = {phase: 2 * value for phase, value in line["phases"].items()}
    return RecordedRun.of(first), RecordedRun.of(second)


def test_numbers_have_their_ratio() -> None:
    page = "".join(pair_sections(pair()))
    for row in (
        ("last validation loss", "3.125", "3.125", "1.000"),
        ("tokens per second, median", "1,000", "2,000", "2.000"),
        ("ranks", "2", "4", "2.000"),
    ):
        assert "".join(f"<td>{cell}</td>" for cell in row) in page


def test_the_calls_and_bytes_of_a_rank_stand_for_both_runs() -> None:
    page = "".join(pair_sections(pair()))
    cells = ("all_reduce, world", "2", "1.5 MiB", "2", "2.5 MiB")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in page


def test_options_and_facts_that_differ_are_shown_and_others_counted() -> None:
    page = "".join(pair_sections(pair()))
    assert "<td>plan</td><td>–</td><td>&lt;pp&gt;</td>" in page
    assert "1 more are the same." in page
    assert "All 2 are the same." in page  # of the environment


def test_each_run_has_a_colour_in_all_curves() -> None:
    runs = pair()
    for chart in (
        loss_chart_of_two(runs, "step", "loss"),
        loss_chart_of_two(runs, "time_s", "loss"),
        speed_chart_of_two(runs),
    ):
        meanings = {curve.name.split(",")[0]: curve.meaning for curve in chart.curves}
        assert meanings == {"a <run>": "curve", "b": "second"}


def test_the_time_of_a_step_is_a_row_for_each_run() -> None:
    rows = phase_rows_of_two(pair())
    assert rows is not None
    assert [(row.name, row.total) for row in rows.rows] == [("a <run>", "40 ms"), ("b", "80 ms")]


def test_runs_of_one_name_are_told_apart() -> None:
    run = RecordedRun.of(run_lines(ranks=1))
    assert pair_names((run, run)) == ("a <run> (A)", "a <run> (B)")


def test_a_run_that_goes_on_can_be_compared() -> None:
    runs = pair()[0], RecordedRun.of(run_lines(ranks=2, finished=False)[:1])
    titles = re.findall(r"<h2>(.*?)</h2>", "".join(pair_sections(runs)))
    assert titles[:3] == ["Numbers", "Loss", "Throughput"]
