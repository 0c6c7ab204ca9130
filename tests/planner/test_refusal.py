"""A plan that does not fit is named with the rank, the moment and the bytes."""

import pytest

from echelon.planner.layout import Layout, ShardedStates
from echelon.planner.refusal import RefusedPlan, peak_moment
from echelon.planner.step_memory import step_memory
from tests.planner.sizes import MODEL, STACK


def refused(layout: Layout) -> RefusedPlan:
    return RefusedPlan(layout=layout, memory=step_memory(MODEL, layout, STACK), limit=2**30)


def test_the_rank_is_the_first_of_the_fullest_stage() -> None:
    plan = refused(Layout(pp=4, shard=2, microbatches=8, sharded=ShardedStates.OPTIMIZER))
    assert plan.rank == 2 * plan.memory.rank_stage
    assert f"rank {plan.rank} would have" in str(plan)


def test_the_bytes_are_those_of_the_rank_and_the_largest_are_named() -> None:
    plan = refused(Layout())
    assert plan.nbytes == sum(plan.memory.categories().values())
    sizes = [float(text.split()[-1]) for text in plan.largest().split(", ")]
    assert sizes == sorted(sizes, reverse=True)
    assert f"{plan.nbytes / 2**30:.2f} GiB" in str(plan)
    assert "of 1.00 GiB" in str(plan)


@pytest.mark.parametrize(
    ("layout", "stage", "moment"),
    [
        # Stage i of 1F1B keeps p - i microbatches; with gradients from the next forward on.
        (Layout(pp=4, microbatches=8), 0, "after forward 5 of 8"),
        (Layout(pp=4, microbatches=8), 3, "after forward 2 of 8"),
        (Layout(pp=4, microbatches=4), 0, "in backward 1 of 4"),
        (Layout(microbatches=4), 0, "after forward 2 of 4"),
    ],
)
def test_the_moment_is_the_first_with_all_activations_and_gradients(
    layout: Layout, stage: int, moment: str
) -> None:
    assert peak_moment(layout, stage) == moment
