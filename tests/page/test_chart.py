"""A chart has its curves at the places of their values, and its texts beside the drawing."""

import json
import re
from dataclasses import replace

import pytest

from echelon.page import Chart, Curve, Mark, Stroke


def line(**changes: object) -> Curve:
    return Curve(**{"name": "a <b>", "x": [0, 10], "y": [0.0, 4.0], "meaning": "curve", **changes})


def chart(*curves: Curve, **changes: object) -> str:
    options = {"x_label": "step", "y_label": "loss", "from_zero": True, "height": 100}
    return Chart(curves=curves, **{**options, **changes}).html()


def corners(path: str) -> list[tuple[float, float]]:
    return [tuple(map(float, pair.split())) for pair in re.split("[MLZ]", path) if pair]


def test_a_line_runs_from_corner_to_corner_and_leaves_a_margin_above() -> None:
    (path,) = re.findall(r'class="line"[^>]* d="([^"]*)"', chart(line()))
    (left, bottom), (right, top) = corners(path)
    assert (left, bottom, right) == (0.0, 100.0, 1000.0)
    assert 0 < top < 10


def test_a_gap_and_a_step_back_begin_a_line_anew() -> None:
    gap = line(x=[0, 1, 2, 3], y=[1.0, None, 2.0, 3.0])
    back = line(x=[0, 2, 1, 2], y=[1.0, 2.0, 3.0, 4.0])
    for curve in (gap, back):
        (path,) = re.findall(r'class="line"[^>]* d="([^"]*)"', chart(curve))
        assert path.count("M") == 2


def test_areas_lie_on_each_other() -> None:
    areas = [line(name=name, y=[1.0, 3.0], stroke=Stroke.AREA) for name in "ab"]
    first, second = re.findall(r'style="fill:[^"]*" d="([^"]*)"', chart(*areas))
    assert corners(first)[:2] == corners(second)[2:][::-1]


def test_steps_keep_a_value_until_the_next() -> None:
    steps = line(x=[0, 5, 10], y=[2.0, 4.0, 4.0], stroke=Stroke.STEPS)
    (path,) = re.findall(r'style="fill:[^"]*" d="([^"]*)"', chart(steps))
    heights = dict.fromkeys(y for _, y in corners(path))
    (left, low), (until, still_low) = corners(path)[:2]
    assert (left, until) == (0.0, 500.0)
    assert low == still_low
    assert len(heights) == 3  # both values and the ground


def test_texts_are_escaped_also_for_the_script() -> None:
    html = chart(line(), line(name="</script>"))
    assert "a &lt;b&gt;" in html
    assert html.count("</script>") == 1
    (content,) = re.findall(r'application/json">(.*?)</script>', html)
    assert [name for name, *_ in json.loads(content)["curves"]] == ["a <b>", "</script>"]


def test_one_curve_needs_no_legend_and_marks_of_one_name_have_one_entry() -> None:
    html = chart(line(), marks=[Mark(x=x, name="saved", meaning="saving") for x in (1, 2)])
    assert html.count("<li>") == 1
    assert html.count('<path class="mark"') == 2


@pytest.mark.slow
def test_a_long_run_makes_no_long_page() -> None:
    long = line(x=list(range(100_000)), y=[float(i % 977) for i in range(100_000)])
    assert len(chart(long)) < 40_000
    areas = [replace(long, stroke=Stroke.AREA), replace(long, stroke=Stroke.AREA)]
    shown = chart(*areas)
    assert len(shown) < 120_000
    (content,) = re.findall(r'application/json">(.*?)</script>', shown)
    first, second = (xs for _, xs, _ in json.loads(content)["curves"])
    assert first == second
    assert len(first) <= 600


def test_a_chart_of_nothing_can_be_drawn() -> None:
    assert "<svg" in chart(line(x=[], y=[]))
    assert "<svg" in chart(line(y=[None, None]))
    assert "<svg" in chart(line(y=[0.0, 0.0]))
