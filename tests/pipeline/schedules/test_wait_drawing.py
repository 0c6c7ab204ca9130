"""A circle of waits as text and SVG."""

from xml.etree import ElementTree

from echelon.pipeline import WaitRule
from echelon.pipeline.schedules.action_lists import read
from echelon.pipeline.schedules.wait_drawing import circle_in_short, circle_svg, circle_text
from echelon.pipeline.schedules.waits import find_circle

LISTS = read("[... 0SendF1, 2RecvF0, 2F0]\n[... 1SendF0, 1RecvF1, 1F1]")


def test_the_circle_is_drawn_with_both_ranks_and_places() -> None:
    circle = find_circle(LISTS, WaitRule.BLOCKING)
    assert circle_in_short(circle) == "rank 0 at 0SEND_F1, rank 1 at 1SEND_F0"
    text = circle_text(LISTS, circle)
    assert "rank 0 │ 0SEND_F1 2RECV_F0 2F0" in text
    assert "┌─▶ rank 0 waits at 0SEND_F1 (line 1, column 6)" in text


def test_the_svg_has_an_arrow_for_each_wait() -> None:
    circle = find_circle(LISTS, WaitRule.BLOCKING)
    svg = circle_svg(LISTS, {"blocking sends": circle})
    ElementTree.fromstring(svg)
    assert svg.count('class="arrow"') == 2
