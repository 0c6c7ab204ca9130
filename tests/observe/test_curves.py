"""The curves hold the recorded numbers, in units that read well."""

import random

import pytest

from echelon.observe.curves import (
    loss_chart,
    memory_chart,
    memory_of_step_chart,
    phases_chart,
    smoothed,
    speed_chart,
    values_charts,
)
from echelon.observe.recorded_run import RecordedRun
from echelon.page import Stroke
from tests.observe.runs import run_lines


def test_the_loss_has_steps_a_smoothed_line_validation_and_references() -> None:
    chart = loss_chart(RecordedRun.of(run_lines(ranks=2)))
    each, smooth, validation, reference = chart.curves
    assert each.y[4] is None  # it was not finite
    assert smooth.y[4] == smooth.y[3]
    assert (list(validation.x), list(validation.y)) == ([40], [3.125])
    assert (list(reference.x), list(reference.y)) == ([0, 40], [4.25, 4.25])


def test_one_noisy_step_at_the_end_does_not_turn_the_smoothed_curve() -> None:
    noise = random.Random(0)
    losses = [5.0 - i / 100 + noise.uniform(-0.1, 0.1) for i in range(200)]
    before, after = smoothed(losses)[-1], smoothed([*losses, losses[-1] + 1.0])[-1]
    assert after - before < 0.2


def test_the_smoothed_curve_uses_no_later_value() -> None:
    losses = [4.0, None, 2.0, 3.0]
    assert smoothed(losses)[:3] == smoothed(losses[:3])
    assert smoothed([None, 2.0]) == [None, 2.0]


def test_throughput_is_shown_as_utilization_where_both_numbers_are_known() -> None:
    lines = run_lines(ranks=2)
    assert speed_chart(RecordedRun.of(lines)).y_label == "tokens per second"
    lines[0] |= {"flops_per_token": 100.0, "peak_flops": 1e6}
    chart = speed_chart(RecordedRun.of(lines))
    assert chart.y_label == "utilization (%)"
    assert chart.curves[0].y[0] == pytest.approx(100 * 1000.0 * 100.0 / (2 * 1e6))


def test_saves_and_restarts_stand_on_both_axes() -> None:
    first = run_lines(ranks=1, finished=False)
    again = run_lines(ranks=1, first=31)
    again[0] |= {"unix_s": first[0]["unix_s"] + 100.0, "attempt": 1}
    run = RecordedRun.of([*first, *again])
    over_steps = [(mark.name, mark.x) for mark in loss_chart(run).marks]
    over_time = [(mark.name, mark.x) for mark in speed_chart(run).marks]
    assert over_steps == [("checkpoint saved", 20), ("restart", 30)]
    assert over_time == [("checkpoint saved", 2.0), ("restart", 100.0)]
    gap = speed_chart(run).curves[1].y
    assert [i for i, value in enumerate(gap) if value is None] == [40]


def test_each_further_number_has_a_chart() -> None:
    charts = dict(values_charts(RecordedRun.of(run_lines(ranks=1))))
    assert list(charts) == ["learning rate", "gradient norm"]
    assert charts["gradient norm"].curves[0].y[1] == 0.5


def test_memory_over_the_run_has_what_is_held_and_not_what_is_always_empty() -> None:
    chart = memory_chart(RecordedRun.of(run_lines(ranks=1)))
    assert chart is not None
    assert [(curve.name, curve.y[0]) for curve in chart.curves] == [("parameters", 2.0)]
    assert chart.y_label == "memory (MiB)"


def test_gathered_units_that_take_no_memory_are_drawn_over_the_memory() -> None:
    line = {
        "time_s": [0.0, 0.1],
        "nbytes": {"shards": [1024, 1024], "gathered": [0, 0]},
        "units": [["a", 0.02, 0.05, 2048], ["b", 0.04, 0.06, 1024]],
    }
    shards, mapped = memory_of_step_chart(line).curves
    assert (shards.stroke, mapped.stroke) == (Stroke.STEPS, Stroke.LINE)
    assert max(mapped.y) == 3.0  # KiB, of both
    assert (mapped.y[0], mapped.y[-1]) == (0.0, 0.0)
    line["nbytes"]["gathered"] = [0, 2048]
    assert [curve.name for curve in memory_of_step_chart(line).curves] == ["shards", "gathered"]


def test_phases_over_the_run_are_shares_of_all_time() -> None:
    chart = phases_chart(RecordedRun.of(run_lines(ranks=1)))
    assert chart is not None
    assert {curve.name for curve in chart.curves} == {"forward", "waiting for others"}
    assert [sum(column) for column in zip(*(c.y for c in chart.curves), strict=True)] == (
        pytest.approx([100.0] * len(chart.curves[0].x))
    )
