"""What a notebook and ec.show say about plans."""

import pytest

import echelon as ec
from echelon.page import TextTable, view_of
from echelon.planner.layout import Layout
from echelon.planner.plan_views import count_text, plan_table, refused_table
from tests.planner.test_priced_plan import SHARDED, priced
from tests.planner.test_ranked_plans import plans


@pytest.mark.parametrize("power", range(13))
@pytest.mark.parametrize("factor", [1.0, 1.2345, 4.5, 9.949, 9.951, 9.994, 9.996])
def test_a_number_of_parameters_is_shown_with_three_digits_in_the_largest_unit_that_fits(
    power: int, factor: float
) -> None:
    count = round(factor * 10**power)
    number, _, unit = count_text(count).partition(" ")
    scale = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}[unit]
    assert float(number) * scale == pytest.approx(count, rel=0.00505)
    assert len(number.replace(".", "")) == 3 or scale == 1 or count >= 999.5e9
    assert scale == 1e9 or float(number) < 1000


def test_plans_are_a_table_and_the_best_as_a_line_of_a_script() -> None:
    several = plans()
    view = view_of(several)
    table, best = (part.content for part in view.parts)
    assert isinstance(table, TextTable)
    assert [row[0] for row in table.rows] == [str(plan) for plan in several]
    assert best == "\n".join(several.best.options()) or "Plan" in str(best)


def test_if_none_fits_the_nearest_are_a_table() -> None:
    none = plans(max_memory=1e6)
    [part] = view_of(none).parts
    assert isinstance(part.content, TextTable)
    assert part.content.rows[0][1] == str(none.refused[0].rank)
    assert part.content.rows[0][2] == none.refused[0].moment


def test_a_plan_shows_its_terms_its_memory_and_its_schedule() -> None:
    script, terms, memory, schedule = view_of(priced(SHARDED)).parts
    assert str(script.content).startswith("ec.Plan(")
    assert isinstance(terms.content, TextTable)
    assert float(terms.content.rows[-1][1]) == pytest.approx(
        sum(float(row[1]) for row in terms.content.rows[:-1]), abs=1e-3
    )
    assert isinstance(memory.content, TextTable)
    assert len(memory.content.rows) == 8
    assert schedule.title == "Simulated"
    assert len(view_of(priced(Layout(dp=8, microbatches=2))).parts) == 3


def test_a_table_has_costs_where_there_is_a_price() -> None:
    free, paid = priced(SHARDED), priced(SHARDED, price=1.0)
    assert "cost of 1M tokens" not in plan_table([free]).heads
    table = plan_table([paid])
    assert table.rows[0][table.heads.index("cost of 1M tokens")] == f"{paid.cost:.3g}"
    assert all(len(row) == len(table.heads) for row in table.rows)
    assert plan_table([paid], with_bounds=False).heads[-1] == "cost of 1M tokens"


def test_a_table_of_refused_plans_has_rank_moment_and_bytes() -> None:
    nearest = plans(max_memory=1e6).refused[0]
    [row] = refused_table([nearest]).rows
    assert row[1:3] == [str(nearest.rank), nearest.moment]
    assert row[3] == f"{nearest.nbytes / 2**30:.2f} of 0.00"


def test_a_notebook_and_a_terminal_show_them(capsys: pytest.CaptureFixture[str]) -> None:
    several = plans()
    assert str(several.best) in several._repr_html_()
    assert "tokens/s" in several.best._repr_html_()
    ec.show(several)
    ec.show(several.best)
    printed = capsys.readouterr().out
    assert "From the best on" in printed
    assert "Where the time of a step goes" in printed
