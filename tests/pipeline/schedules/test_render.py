"""Drawings show what the timeline says."""

import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest

from echelon.errors import ArgumentError
from echelon.pipeline import Step, Timeline, schedule, simulate, to_page, to_svg, to_text

PLAN = simulate(schedule("1f1b", 2, 3, 2), {"F": 1, "B": 2})


def measured(seconds: float) -> Timeline:
    """A run in which everything took longer, on a clock that does not start at 0."""
    steps = [
        Step(s.rank, s.item, 50 + s.start * seconds, 50 + s.end * seconds)
        for s in reversed(PLAN.timeline.steps)
    ]
    return Timeline.of(2, steps)


def rectangles(svg: str) -> list[tuple[float, float]]:
    name = "{http://www.w3.org/2000/svg}rect"
    found = ElementTree.fromstring(svg).iter(name)
    return [(float(r.attrib["x"]), float(r.attrib["width"])) for r in found]


def test_a_grid_has_a_cell_for_each_unit_of_time() -> None:
    assert to_text(PLAN.timeline).splitlines() == [
        "rank 0 | 0F0 0F1  .   .  0B0 === 0F2 0B1 ===  .  0B2 ===",
        "rank 1 |  .  1F0 1B0 === 1F1 1B1 === 1F2 1B2 ===  .   .",
    ]


@pytest.mark.slow
def test_a_grid_too_wide_to_read_is_refused_with_what_to_do() -> None:
    wide = simulate(schedule("gpipe", 4, 600, 4)).timeline
    with pytest.raises(ArgumentError, match="draw an SVG, or give a unit larger than 1"):
        to_text(wide)
    with pytest.raises(ArgumentError, match="unit is 0"):
        to_text(wide, unit=0)


def test_a_drawing_has_one_rectangle_per_step_with_its_name_and_times() -> None:
    svg = to_svg({"simulated": PLAN.timeline})
    assert len(rectangles(svg)) == len(PLAN.timeline.steps) == 12
    titles = [t.text for t in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
    assert "rank 1: 1B0, 2 to 4" in titles


def test_timelines_over_each_other_share_one_scale() -> None:
    svg = to_svg({"simulated": PLAN.timeline, "measured": measured(1.5)}, width=1000)
    found = rectangles(svg)
    plan, run = found[:12], found[12:]
    assert run[0][0] == plan[0][0] == 64
    for (x, width), (later, wider) in zip(plan, run, strict=True):
        assert later - 64 == pytest.approx(1.5 * (x - 64), abs=0.03)
        assert wider + 0.5 == pytest.approx(1.5 * (width + 0.5), abs=0.03)


class Loads(HTMLParser):
    """What a page would fetch, and its words."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs) -> None:
        self.fetched += [f"{tag} {value}" for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data) -> None:
        self.words.append(data)


def test_a_page_needs_nothing_else_and_has_the_plan_and_the_run_in_numbers() -> None:
    page = to_page(PLAN, measured(1.5), unit="s")
    parser = Loads()
    parser.feed(page)
    assert parser.fetched == []
    words = " ".join(parser.words)
    assert "1f1b: 2 ranks, 2 stages, 3 microbatches" in words
    assert f"{PLAN.makespan:g} s" in words
    assert f"{1.5 * PLAN.makespan:g} s" in words
    assert words.count(f"{PLAN.span_bubble:.2%}") == 2
    assert "measured busy" in words
    assert "measured" not in to_page(PLAN)


def test_a_run_of_another_size_is_not_drawn_over_a_plan() -> None:
    with pytest.raises(ArgumentError, match="has 3 ranks and the simulated one 2"):
        to_page(PLAN, Timeline.of(3, []))


def test_a_timeline_without_steps_is_drawn_empty() -> None:
    empty = Timeline.of(2, [])
    assert to_text(empty) == "rank 0 |\nrank 1 |"
    assert rectangles(to_svg({"none": empty})) == []


SCHEDULE = PLAN.schedule


def test_all_three_take_a_schedule_a_simulation_a_timeline_and_a_dict_of_them() -> None:
    plain = simulate(SCHEDULE)
    assert to_text(SCHEDULE) == to_text(plain) == to_text(plain.timeline)
    assert (
        rectangles(to_svg(SCHEDULE))
        == rectangles(to_svg(plain))
        == rectangles(to_svg(plain.timeline))
    )
    for drawn in (SCHEDULE, plain, plain.timeline, {"a": SCHEDULE, "b": PLAN}):
        assert "<svg" in to_page(drawn)
    text = to_text({"a": SCHEDULE, "b": PLAN.timeline})
    assert text == f"a\n{to_text(plain)}\nb\n{to_text(PLAN)}"
    assert len(rectangles(to_svg({"a": SCHEDULE, "b": PLAN}))) == 24


def test_what_cannot_be_drawn_is_refused_alike() -> None:
    for draw in (to_text, to_svg, to_page):
        with pytest.raises(ArgumentError, match=r"this is '1f1b', which is not drawn here; give a"):
            draw("1f1b")
        with pytest.raises(ArgumentError, match="this is 3, which is not drawn"):
            draw({"a": 3})
