from dataclasses import replace

import pytest

import echelon as ec
from echelon.planner.layout import Layout
from echelon.planner.plan_search import SearchLimits, layouts, search
from echelon.planner.step_memory import step_memory
from echelon.planner.step_time import step_time
from tests.planner.sizes import MODEL, STACK, cluster


def test_every_layout_uses_all_devices_and_the_whole_batch() -> None:
    every = list(layouts(MODEL, cluster(2, 4), SearchLimits(global_batch=16)))
    assert len(every) == len(set(every)) > 50
    assert {(layout.num_ranks, layout.global_batch) for layout in every} == {(8, 16)}


def test_the_best_are_those_of_an_exhaustive_search() -> None:
    place = cluster(2, 4)
    limits = SearchLimits(global_batch=16, max_memory=2e9, keep=5)
    result = search(MODEL, place, STACK, limits)
    fitting = [
        layout
        for layout in layouts(MODEL, place, limits)
        if step_memory(MODEL, layout, STACK).total <= 2e9
    ]
    times = sorted(step_time(MODEL, layout, place, STACK).total for layout in fitting)
    assert result.num_fitting == len(fitting)
    assert [planned.time.total for planned in result.best if planned.time] == times[:5]


def test_fixed_axes_are_kept() -> None:
    limits = SearchLimits(global_batch=16, fixed={"pp": 2, "tp": 2})
    result = search(MODEL, cluster(1, 8), STACK, limits)
    assert {(planned.layout.pp, planned.layout.tp) for planned in result.best} == {(2, 2)}


def test_what_does_not_fit_is_refused_with_stage_and_bytes() -> None:
    result = search(MODEL, cluster(1, 1), STACK, SearchLimits(global_batch=1, max_memory=1e6))
    assert result.best == ()
    assert result.nearest is not None
    assert "stage 0 of 1 would have" in result.nearest.refusal()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"global_batch": 0}, "global_batch is 0"),
        ({"global_batch": 8, "fixed": {"zz": 2}}, "fixed has 'zz'"),
    ],
)
def test_wrong_limits_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(ec.ArgumentError, match=sentence):
        SearchLimits(**options)  # type: ignore[arg-type]


def test_a_batch_that_no_plan_divides_is_refused() -> None:
    with pytest.raises(ec.ArgumentError, match="no plan divides 7 devices"):
        search(
            replace(MODEL, heads=8),
            cluster(1, 7),
            STACK,
            SearchLimits(global_batch=3, fixed={"pp": 1}),
        )


def test_of_equally_fast_layouts_the_simplest_is_taken() -> None:
    result = search(MODEL, cluster(1, 1), STACK, SearchLimits(global_batch=1))
    assert result.best[0].layout == Layout()
