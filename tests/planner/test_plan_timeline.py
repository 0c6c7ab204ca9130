"""The pipeline of a plan as a simulated schedule."""

import pytest

from echelon.planner.layout import Layout, Recompute
from echelon.planner.plan_timeline import drawn_microbatches, simulated
from tests.planner.test_priced_plan import priced


@pytest.mark.parametrize("recompute", list(Recompute))
def test_a_simulated_pipeline_takes_the_time_of_the_formula(recompute: Recompute) -> None:
    plan = priced(Layout(pp=4, dp=2, microbatches=8, recompute=recompute))
    terms = plan.time.terms()
    apart = sum(terms[name] for name in ("reduce", "optimizer", "other"))
    # The last stage has the head, and messages are hidden between its microbatches.
    assert simulated(plan).makespan == pytest.approx(plan.seconds - apart, rel=0.05)


def test_a_stage_computes_as_long_as_the_terms_of_the_slowest_say() -> None:
    plan = priced(Layout(pp=2, dp=4, microbatches=4))
    terms = plan.time.terms()
    names = ("matmul", "attention", "memory", "launch", "message")
    computing = sum(terms[name] for name in names)
    assert max(simulated(plan).busy) == pytest.approx(computing)


def test_chunks_are_stages_of_an_interleaved_schedule() -> None:
    simulation = simulated(priced(Layout(pp=2, dp=4, chunks=2, microbatches=4)))
    assert simulation.schedule.name == "interleaved"
    assert simulation.schedule.num_stages == 4


def test_a_schedule_that_splits_the_backward_is_drawn_with_its_halves() -> None:
    simulation = simulated(priced(Layout(pp=2, dp=4, microbatches=4, schedule="zb-h1")))
    assert simulation.schedule.name == "zb-h1"
    assert any("W" in str(step.item) for step in simulation.timeline.steps)


def test_a_long_pipeline_is_drawn_with_fewer_microbatches() -> None:
    assert drawn_microbatches(priced(Layout(pp=4, dp=2, microbatches=8))) == 8
    long = priced(Layout(pp=4, dp=2, microbatches=4096))
    count = drawn_microbatches(long)
    assert 4 <= count < 4096
    assert simulated(long, count).schedule.num_microbatches == count
