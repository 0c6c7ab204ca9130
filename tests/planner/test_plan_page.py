"""The page of plans: what is on it, and that it loads nothing."""

import re
from dataclasses import replace

import pytest

from echelon.planner.layout_space import LayoutSpace, SearchLimits
from echelon.planner.plan_page import plans_page
from echelon.planner.ranked_plans import Plans
from tests.planner.sizes import MODEL, STACK, cluster
from tests.planner.test_ranked_plans import plans


def test_a_page_has_all_sections_and_loads_no_other_file() -> None:
    limits = SearchLimits(global_batch=16, fixed={"pp": 2, "chunks": 2}, keep=3)
    several = Plans(LayoutSpace(MODEL, replace(cluster(1, 8), price=1.5), STACK, limits), "cost")
    page = plans_page(several)
    sections = re.findall("<h2>(.*?)</h2>", page)
    assert sections[:8] == [
        "From the best on",
        "The best plan as a line of a script",
        "Where the time of a step goes",
        "What the memory is for",
        "The schedule",
        "Memory over the step",
        "Time and memory",
        "All terms",
    ]
    assert not re.search(r"""(src|href)=|url\(|@import|https?://(?!www\.w3\.org)""", page)
    assert page.count("<details>") == len(several) == 3
    assert "cost of 1M tokens" in page


def test_the_bars_are_as_long_as_the_step_and_the_memory() -> None:
    several = plans()
    page = plans_page(several)
    seconds = [float(tip) for tip in re.findall(r'title="\w+: ([\d.e+-]+) seconds"', page)]
    assert abs(sum(seconds) / sum(plan.seconds for plan in several) - 1) < 0.01
    gib = [float(tip) for tip in re.findall(r'title="\w+: ([\d.e+-]+) GiB"', page)]
    assert abs(sum(gib) * 2**30 / sum(plan.memory.total for plan in several) - 1) < 0.01


def test_the_front_is_drawn_with_its_plans() -> None:
    several = plans()
    page = plans_page(several)
    front = page[page.index("Time and memory") :]
    assert all(f"<td>{plan.seconds:.3g}</td>" in front for plan in several.pareto)


def test_without_a_pipeline_there_is_no_schedule() -> None:
    limits = SearchLimits(global_batch=16, fixed={"pp": 1}, keep=1)
    page = plans_page(Plans(LayoutSpace(MODEL, cluster(1, 8), STACK, limits), "tokens/s"))
    assert "The schedule" not in page


@pytest.mark.slow
def test_a_long_schedule_says_with_how_many_microbatches_it_is_drawn() -> None:
    fixed = {"pp": 4, "chunks": 1, "microbatch": 1, "tp": 1, "cp": 1}
    limits = SearchLimits(global_batch=4096, fixed=fixed, keep=1)
    page = plans_page(Plans(LayoutSpace(MODEL, cluster(1, 4), STACK, limits), "tokens/s"))
    assert re.search(r"Drawn with \d+ of the 4096 microbatches", page)


def test_if_none_fits_the_page_has_the_refused() -> None:
    none = plans(max_memory=1e6)
    page = plans_page(none)
    assert "None fits" in page
    assert none.refused[0].moment in page
